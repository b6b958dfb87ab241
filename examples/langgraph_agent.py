"""An agent of LangGraph, trained as it is: `python examples/langgraph_agent.py [DIRECTORY] [STEPS]`, two minutes.

It takes `pip install langgraph langchain-openai`. The graph is one as LangGraph's own pages draw it, a model and its
tools in turn; all that is said to it is where its model is. How many of a thing are there in a storeroom? A tiny model,
which has seen functions being called and mostly guesses, learns to ask the tools.
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
    """Run the graph, and see whether it knows in the end."""

    @tool
    def find(kind: str) -> str:
        """The shelf on which a kind of thing lies."""
        return task["shelves"].get(kind, "?")

    @tool
    def count(shelf: str) -> str:
        """How many things lie on a shelf."""
        return task["numbers"].get(shelf, "?")

    model = ChatOpenAI(model=llm.model, base_url=llm.base_url, api_key=llm.api_key).bind_tools([find, count])
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([find, count]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    said = graph.compile().invoke({"messages": [("user", task["question"])]})["messages"]
    return float(said[-1].content == task["answer"])


def main(directory: Path, steps: int) -> None:
    """Make the model and the tasks, train, and say what came of it."""
    warm_up(directory / "model", seed=0, advance=lambda: None)
    options = {"model.path": directory / "model", "steps": steps, **LENGTHS, **TRAINING, **COLLECTED}
    trainer = etude.Trainer(etude.RL("grpo", options, directory / "run"))
    told = trainer.fit(solve, make_rows(0, 1000, held_out=False), make_rows(0, 50, held_out=True))
    print(f"\nRight answers to held-out questions: {told['eval/mean@1']:.0%}. Next: etude answers {directory / 'run'}")


if __name__ == "__main__":
    main(Path((sys.argv[1:] or ["runs/langgraph-agent"])[0]), int((sys.argv[2:] or ["12"])[0]))
