"""Train an unchanged LangGraph agent: `python examples/langgraph_agent.py [DIRECTORY] [STEPS]`, two minutes.

It needs `pip install langgraph langchain-openai`. The graph is that of LangGraph's documentation: a model and its tools
in turn. Only the address of its model is set. The question is the number of things of a kind in a storeroom. A tiny
model, which has seen tool calls and mostly guesses, learns to call the tools.
"""

import sys
from pathlib import Path

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

import etude
from etude.demo.storeroom_agent import make_rows
from etude.demo.storeroom_model import warm_up

LENGTHS = {"sampling.max_tokens": 12, "data.max_prompt_length": 80}  # a model of yours has its own
TRAINING = {"train.precision": "fp32", "train.learning_rate": 2e-3, "threads": 1}
COLLECTED = {"collect.tasks": 16, "collect.group_size": 8}


@etude.agent
def solve(task, llm) -> float:
    """Run the graph, and return 1 if the last message is the right answer."""

    @tool
    def find(kind: str) -> str:
        """The shelf on which a kind of thing lies."""
        return task["shelves"].get(kind, "?")

    @tool
    def count(shelf: str) -> str:
        """The number of things on a shelf."""
        return task["numbers"].get(shelf, "?")

    model = ChatOpenAI(model=llm.model, base_url=llm.base_url, api_key=llm.api_key).bind_tools([find, count])
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([find, count]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    messages = graph.compile().invoke({"messages": [("user", task["question"])]})["messages"]
    return float(messages[-1].content == task["answer"])


def main(directory: Path, steps: int) -> None:
    """Make the model and the tasks, train, and print the score."""
    warm_up(directory / "model", seed=0, advance=lambda: None)
    options = {"model.path": directory / "model", "steps": steps, **LENGTHS, **TRAINING, **COLLECTED}
    trainer = etude.Trainer(etude.RL("grpo", options, directory / "run"))
    scores = trainer.fit(solve, make_rows(0, 1000, held_out=False), make_rows(0, 50, held_out=True))
    print(f"\nRight answers to held-out questions: {scores['eval/mean@1']:.0%}. See: etude answers {directory / 'run'}")


if __name__ == "__main__":
    main(Path((sys.argv[1:] or ["runs/langgraph-agent"])[0]), int((sys.argv[2:] or ["12"])[0]))
