// The npm package `ollama`: what editors' extensions use.

import { strict as assert } from "node:assert";
import { Ollama } from "ollama";
import { assertCancelled, BASE, check, FAKE_BASE, longReply, PICTURE, QUESTION, says, saysCall, SCHEMA, SOUND } from "./checks.mjs";

const real = new Ollama({ host: BASE });
const fake = new Ollama({ host: FAKE_BASE });
const user = (content) => [{ role: "user", content }];
const TOOL = { type: "function", function: { name: "look", description: "Weather.", parameters: SCHEMA } };

check("models", async () => {
  const { models } = await real.list();
  assert.ok(models.some((model) => model.name.replace(":latest", "") === "tiny"));
  const shown = await real.show({ model: "caller" });
  assert.ok(shown.capabilities.includes("tools"));
  assert.ok(shown.model_info["general.architecture"]);
  assert.match((await real.version()).version, /^\d+\.\d+\.\d+$/);
  await real.chat({ model: "tiny", messages: user(QUESTION), options: { num_predict: 1 } });
  const running = await real.ps();
  assert.ok(running.models.every((model) => model.context_length > 0));
});

check("chat", async () => {
  const answer = await real.chat({ model: "tiny", messages: user(QUESTION), options: { num_predict: 8 } });
  assert.ok(answer.message.content);
  assert.ok(answer.eval_count <= 8);
});

check("stream", async () => {
  let text = "";
  for await (const part of await fake.chat({ model: "caller", messages: user(says("some words")), stream: true })) {
    assert.equal(part.message.role, "assistant");
    text += part.message.content;
  }
  assert.equal(text, "some words");
});

check("tools", async () => {
  const messages = user(saysCall("look", { city: "Paris", warm: true }));
  const { message } = await fake.chat({ model: "caller", messages, tools: [TOOL] });
  assert.deepEqual(message.tool_calls[0].function.arguments, { city: "Paris", warm: true });
  messages.push(message, { role: "tool", tool_name: "look", content: says("It is warm.") });
  assert.equal((await fake.chat({ model: "caller", messages, tools: [TOOL] })).message.content, "It is warm.");
});

check("structured-output", async () => {
  const answer = await real.chat({ model: "tiny", messages: user(QUESTION), format: SCHEMA });
  assert.deepEqual(Object.keys(JSON.parse(answer.message.content)).sort(), ["city", "warm"]);
});

check("embeddings", async () => {
  const { embeddings } = await real.embed({ model: "bert", input: ["the cat", "the dog"] });
  assert.deepEqual(embeddings.map((vector) => vector.length), [64, 64]);
});

check("cancel", async () => {
  const stream = await fake.chat({ model: "caller", messages: user(longReply()), stream: true });
  await assert.rejects(async () => {
    for await (const _ of stream) stream.abort();
  }, { name: "AbortError" });
  await assertCancelled(FAKE_BASE);
});

check("errors", async () => {
  await assert.rejects(real.chat({ model: "nowhere", messages: user("x") }), { status_code: 404 });
  await assert.rejects(real.chat({ model: "tiny", messages: user("x"), options: { top_p: 7 } }), { status_code: 400 });
});

check("picture", async () => {
  const ask = (images) =>
    real.chat({ model: "gemma3", messages: [{ role: "user", content: "what?", images }], options: { num_predict: 4 } });
  const [blind, seeing] = [await ask([]), await ask([new Uint8Array(Buffer.from(PICTURE, "base64"))])];
  assert.ok(seeing.prompt_eval_count > blind.prompt_eval_count);
});

check("sound", async () => {
  const answer = await real.generate({
    model: "ultravox", prompt: "what?", images: [SOUND], options: { num_predict: 4 },
  });
  assert.ok(answer.prompt_eval_count > 375);
});
