// An agent as the AI SDK's documents write it: the default provider, one tool, steps until it has answered.
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const openai = createOpenAI({ baseURL: process.env.OPENAI_BASE_URL, apiKey: process.env.OPENAI_API_KEY });
const asked = {
  model: process.argv[2] === "chat" ? openai.chat("policy") : openai("policy"),
  instructions: "Be kind.",
  prompt: "What is in the notes? Look it up.",
  stopWhen: stepCountIs(4),
  tools: {
    look: tool({
      description: "Look up what belongs to a key.",
      inputSchema: z.object({ key: z.string() }),
      execute: async ({ key }) => `${key}: the secret is heliotrope`,
    }),
  },
};
if (process.argv[3] === "streamed") {
  const result = streamText(asked);
  console.log(JSON.stringify({ text: await result.text, steps: (await result.steps).length }));
} else {
  const result = await generateText(asked);
  console.log(JSON.stringify({ text: result.text, steps: result.steps.length }));
}
