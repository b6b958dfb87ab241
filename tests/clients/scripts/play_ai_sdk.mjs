// The AI SDK with its provider of OpenAI, by the API that its first argument names. It prints what `features.py` does.
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, Output, streamText, tool } from "ai";
import { z } from "zod";

const look = tool({
  description: "Look up what belongs to a key.",
  inputSchema: z.object({ key: z.string() }),
  execute: async ({ key }) => `${key}: the secret is heliotrope`,
});

function model(key, name = "policy") {
  const openai = createOpenAI({ baseURL: `${process.env.ETUDE_URL}/v1`, apiKey: key });
  return process.argv[2] === "chat" ? openai.chat(name) : openai(name);
}

const features = {
  call: async (key) => (await generateText({ model: model(key), prompt: "Hello." })).text,
  stream: async (key) => await streamText({ model: model(key), prompt: "Hello." }).text,
  tools: async (key) => {
    const asked = {
      model: model(key),
      instructions: "Be kind.",
      prompt: "What is in the notes? Look it up.",
      stopWhen: stepCountIs(4),
      tools: { look },
    };
    const whole = (await generateText(asked)).text;
    const streamed = await streamText(asked).text;
    return whole === streamed ? whole : `${whole} or ${streamed}`;
  },
  structured: async (key) => {
    const schema = z.object({ colour: z.enum(["red", "blue"]) });
    const asked = { model: model(key), prompt: "Which colour?", output: Output.object({ schema }) };
    return (await generateText(asked)).output.colour;
  },
  error: async (key) => (await generateText({ model: model(key, "nobody"), prompt: "Hello." })).text,
  drop: async (key) => {
    const leaves = new AbortController();
    const asked = { model: model(key), prompt: "Please count for ever.", abortSignal: leaves.signal };
    for await (const _ of streamText(asked).textStream) leaves.abort();
    return "dropped";
  },
};

const keys = JSON.parse(process.env.ETUDE_KEYS);
const results = {};
for (const [name, feature] of Object.entries(features)) {
  try {
    results[name] = { value: await feature(keys[name]) };
  } catch (error) {
    results[name] = { error: `${error.name}: ${error.message}` };
  }
}
console.log(JSON.stringify(results));
