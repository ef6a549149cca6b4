// The npm package `openai`.

import { strict as assert } from "node:assert";
import OpenAI from "openai";
import { assertCancelled, BASE, check, FAKE_BASE, longReply, PICTURE, QUESTION, says, saysCall, SCHEMA, SOUND } from "./checks.mjs";

const real = new OpenAI({ baseURL: `${BASE}/v1`, apiKey: "unused", maxRetries: 0 });
const fake = new OpenAI({ baseURL: `${FAKE_BASE}/v1`, apiKey: "unused", maxRetries: 0 });
const user = (content) => [{ role: "user", content }];
const TOOL = { type: "function", function: { name: "look", description: "Weather.", parameters: SCHEMA, strict: true } };

check("models", async () => {
  const ids = [];
  for await (const model of real.models.list()) ids.push(model.id.replace(":latest", ""));
  assert.ok(ids.includes("tiny"));
});

check("chat", async () => {
  const answer = await real.chat.completions.create({ model: "tiny", messages: user(QUESTION), max_tokens: 8 });
  assert.ok(answer.choices[0].message.content);
  assert.ok(answer.usage.completion_tokens <= 8);
});

check("stream", async () => {
  const stream = fake.chat.completions.stream({
    model: "caller", messages: user(says("some words")), stream_options: { include_usage: true },
  });
  const final = await stream.finalChatCompletion();
  assert.equal(final.choices[0].message.content, "some words");
  assert.ok(final.usage.completion_tokens > 0);
});

check("tools", async () => {
  let called = null;
  const runner = fake.chat.completions.runTools({
    model: "caller",
    messages: user(saysCall("look", { city: "Paris", warm: true })),
    tools: [{
      type: "function",
      function: { ...TOOL.function, parse: JSON.parse, function: (given) => {
        called = given;
        return says("It is warm.");
      } },
    }],
    stream: true,
  });
  assert.equal(await runner.finalContent(), "It is warm.");
  assert.deepEqual(called, { city: "Paris", warm: true });
});

check("structured-output", async () => {
  const answer = await real.chat.completions.parse({
    model: "tiny", messages: user(QUESTION),
    response_format: { type: "json_schema", json_schema: { name: "weather", schema: SCHEMA, strict: true } },
  });
  assert.deepEqual(Object.keys(JSON.parse(answer.choices[0].message.content)).sort(), ["city", "warm"]);
});

check("responses", async () => {
  const stream = fake.responses.stream({
    model: "caller", input: saysCall("look", { city: "Paris", warm: true }), tools: [{ type: "function", ...TOOL.function }],
  });
  const response = await stream.finalResponse();
  const call = response.output.find((item) => item.type === "function_call");
  assert.deepEqual(JSON.parse(call.arguments), { city: "Paris", warm: true });
  const after = await fake.responses.create({
    model: "caller", previous_response_id: response.id,
    input: [{ type: "function_call_output", call_id: call.call_id, output: says("It is warm.") }],
  });
  assert.equal(after.output_text, "It is warm.");
});

check("embeddings", async () => {
  const { data } = await real.embeddings.create({ model: "bert", input: ["the cat", "the dog"] });
  assert.deepEqual(data.map((row) => row.embedding.length), [64, 64]);
});

check("cancel", async () => {
  const stream = await fake.chat.completions.create({ model: "caller", messages: user(longReply()), stream: true });
  for await (const _ of stream) break;
  await assertCancelled(FAKE_BASE);
});

check("errors", async () => {
  await assert.rejects(real.chat.completions.create({ model: "nowhere", messages: user("x") }), OpenAI.NotFoundError);
  await assert.rejects(
    real.chat.completions.create({ model: "tiny", messages: user("x"), temperature: -1 }),
    (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature",
  );
});

check("picture", async () => {
  const what = { type: "text", text: "what?" };
  const url = `data:image/png;base64,${PICTURE}`;
  const ask = (content) => real.chat.completions.create({ model: "gemma3", messages: user(content), max_tokens: 4 });
  const [blind, seeing] = [await ask([what]), await ask([what, { type: "image_url", image_url: { url } }])];
  assert.ok(seeing.usage.prompt_tokens > blind.usage.prompt_tokens);
  const parts = [{ type: "input_text", text: "what?" }, { type: "input_image", image_url: url, detail: "auto" }];
  const response = await real.responses.create({ model: "gemma3", input: user(parts), max_output_tokens: 4 });
  assert.equal(response.usage.input_tokens, seeing.usage.prompt_tokens);
});

check("sound", async () => {
  const heard = [{ type: "input_audio", input_audio: { data: SOUND, format: "wav" } }];
  const { usage } = await real.chat.completions.create({ model: "ultravox", messages: user(heard), max_tokens: 4 });
  assert.ok(usage.prompt_tokens > 375);
});
