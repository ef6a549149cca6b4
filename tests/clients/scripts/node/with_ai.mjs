// The npm package `ai` with its providers for Ollama and for OpenAI-compatible servers.

import { strict as assert } from "node:assert";
import { embedMany, generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { createOllama } from "ollama-ai-provider-v2";
import { assertCancelled, BASE, check, FAKE_BASE, longReply, PICTURE, QUESTION, says, saysCall, SCHEMA } from "./checks.mjs";

const ollama = (url) => createOllama({ baseURL: `${url}/api` });
const openai = (url) =>
  createOpenAICompatible({ name: "localrun", baseURL: `${url}/v1`, supportsStructuredOutputs: true });
const quiet = { maxRetries: 0 };

const look = (called) =>
  tool({
    description: "Weather.",
    inputSchema: jsonSchema(SCHEMA),
    execute: async (given) => {
      called.push(given);
      return says("It is warm.");
    },
  });

async function chat(way) {
  const answer = await generateText({ ...quiet, model: way(BASE)("tiny"), prompt: QUESTION, maxOutputTokens: 8 });
  assert.ok(answer.text);
  assert.ok(answer.usage.outputTokens > 0);
}

async function stream(way) {
  const answer = streamText({ ...quiet, model: way(FAKE_BASE)("caller"), prompt: says("some words") });
  let text = "";
  for await (const piece of answer.textStream) text += piece;
  assert.equal(text, "some words");
  assert.equal(await answer.finishReason, "stop");
}

async function tools(way) {
  const called = [];
  const answer = await generateText({
    ...quiet, model: way(FAKE_BASE)("caller"), prompt: saysCall("look", { city: "Paris", warm: true }),
    tools: { look: look(called) }, stopWhen: stepCountIs(3),
  });
  assert.deepEqual(called, [{ city: "Paris", warm: true }]);
  assert.equal(answer.text, "It is warm.");
}

async function streamedTools(way) {
  const called = [];
  const answer = streamText({
    ...quiet, model: way(FAKE_BASE)("caller"), prompt: saysCall("look", { city: "London", warm: false }),
    tools: { look: look(called) }, stopWhen: stepCountIs(3),
  });
  assert.equal(await answer.text, "It is warm.");
  assert.deepEqual(called, [{ city: "London", warm: false }]);
}

async function structuredOutput(way) {
  const answer = await generateText({
    ...quiet, model: way(BASE)("tiny"), prompt: QUESTION, output: Output.object({ schema: jsonSchema(SCHEMA) }),
  });
  assert.deepEqual(Object.keys(answer.output).sort(), ["city", "warm"]);
}

async function picture(way) {
  const ask = (content) =>
    generateText({ ...quiet, model: way(BASE)("gemma3"), messages: [{ role: "user", content }], maxOutputTokens: 4 });
  const what = { type: "text", text: "what?" };
  // The provider for Ollama sends bytes as an object of numbers, and base64 as it is.
  const image = { type: "image", image: PICTURE, mediaType: "image/png" };
  const [blind, seeing] = [await ask([what]), await ask([what, image])];
  assert.ok(seeing.usage.inputTokens > blind.usage.inputTokens);
}

async function embeddings(model) {
  const { embeddings } = await embedMany({ ...quiet, model, values: ["the cat", "the dog"] });
  assert.deepEqual(embeddings.map((vector) => vector.length), [64, 64]);
}

async function cancel(way) {
  const stop = new AbortController();
  const answer = streamText({
    ...quiet, model: way(FAKE_BASE)("caller"), prompt: longReply(), abortSignal: stop.signal, onError: () => {},
  });
  for await (const _ of answer.textStream) {
    stop.abort();
    break;
  }
  await assertCancelled(FAKE_BASE);
}

async function errors(way) {
  await assert.rejects(
    generateText({ ...quiet, model: way(BASE)("nowhere"), prompt: "x" }),
    // The provider for Ollama takes its message from the status line; the answer is in the body.
    (error) => error.statusCode === 404 && error.responseBody.includes("nowhere"),
  );
}

check("ollama-chat", () => chat(ollama));
check("ollama-stream", () => stream(ollama));
check("ollama-tools", () => tools(ollama));
check("ollama-streamed-tools", () => streamedTools(ollama));
check("ollama-structured-output", () => structuredOutput(ollama));
check("ollama-picture", () => picture(ollama));
check("ollama-cancel", () => cancel(ollama));
check("ollama-errors", () => errors(ollama));
check("ollama-embeddings", () => embeddings(ollama(BASE).embedding("bert")));
check("openai-chat", () => chat(openai));
check("openai-stream", () => stream(openai));
check("openai-tools", () => tools(openai));
check("openai-streamed-tools", () => streamedTools(openai));
check("openai-structured-output", () => structuredOutput(openai));
check("openai-picture", () => picture(openai));
check("openai-cancel", () => cancel(openai));
check("openai-errors", () => errors(openai));
check("openai-embeddings", () => embeddings(openai(BASE).textEmbeddingModel("bert")));
