// The npm package `@anthropic-ai/sdk`.

import { strict as assert } from "node:assert";
import Anthropic from "@anthropic-ai/sdk";
import { assertCancelled, BASE, check, FAKE_BASE, longReply, PICTURE, QUESTION, says, saysCall, SCHEMA } from "./checks.mjs";

const real = new Anthropic({ baseURL: BASE, apiKey: "unused", maxRetries: 0 });
const fake = new Anthropic({ baseURL: FAKE_BASE, apiKey: "unused", maxRetries: 0 });
const user = (content) => [{ role: "user", content }];
const TOOL = { name: "look", description: "Weather.", input_schema: SCHEMA };

check("message", async () => {
  const answer = await real.messages.create({ model: "tiny", max_tokens: 8, messages: user(QUESTION) });
  assert.equal(answer.content[0].type, "text");
  assert.ok(answer.usage.output_tokens <= 8);
});

check("stream", async () => {
  const stream = fake.messages.stream({ model: "caller", max_tokens: 50, messages: user(says("some words")) });
  assert.equal(await stream.finalText(), "some words");
});

check("tools", async () => {
  const messages = user(saysCall("look", { city: "Paris", warm: true }));
  const stream = fake.messages.stream({ model: "caller", max_tokens: 200, messages, tools: [TOOL] });
  const answer = await stream.finalMessage();
  assert.equal(answer.stop_reason, "tool_use");
  const call = answer.content.find((block) => block.type === "tool_use");
  assert.deepEqual(call.input, { city: "Paris", warm: true });
  messages.push(
    { role: "assistant", content: answer.content },
    ...user([{ type: "tool_result", tool_use_id: call.id, content: says("It is warm.") }]),
  );
  const after = await fake.messages.create({ model: "caller", max_tokens: 50, messages, tools: [TOOL] });
  assert.equal(after.content[0].text, "It is warm.");
});

check("count-tokens", async () => {
  const { input_tokens } = await real.messages.countTokens({ model: "tiny", messages: user(QUESTION) });
  assert.ok(input_tokens > 3);
});

check("cancel", async () => {
  const stream = await fake.messages.create({ model: "caller", max_tokens: 4000, messages: user(longReply()), stream: true });
  for await (const event of stream) if (event.type === "content_block_delta") break;
  await assertCancelled(FAKE_BASE);
});

check("errors", async () => {
  await assert.rejects(
    real.messages.create({ model: "nowhere", max_tokens: 1, messages: user("x") }),
    Anthropic.NotFoundError,
  );
  await assert.rejects(
    real.messages.create({ model: "tiny", max_tokens: 0.5, messages: user("x") }),
    Anthropic.BadRequestError,
  );
});

check("picture", async () => {
  const source = { type: "base64", media_type: "image/png", data: PICTURE };
  const messages = user([{ type: "image", source }, { type: "text", text: "what?" }]);
  const { usage } = await real.messages.create({ model: "gemma3", max_tokens: 4, messages });
  const { input_tokens } = await real.messages.countTokens({ model: "gemma3", messages });
  assert.equal(usage.input_tokens + usage.cache_read_input_tokens, input_tokens);
  const blind = await real.messages.countTokens({ model: "gemma3", messages: user("what?") });
  assert.ok(input_tokens > blind.input_tokens);
});
