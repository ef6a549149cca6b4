// Runs a client's checks and prints a JSON line for each. `URL` is a daemon with real weights, `FAKE_URL` one whose
// engines write what a prompt tells them (`says`).

import { strict as assert } from "node:assert";

export const BASE = process.env.LOCALRUN_TEST_URL;
export const FAKE_BASE = process.env.LOCALRUN_TEST_FAKE_URL;
// A PNG for the model `gemma3` and a WAV for `ultravox`, in base64. Both models are at `BASE`.
export const PICTURE = process.env.LOCALRUN_TEST_PICTURE;
export const SOUND = process.env.LOCALRUN_TEST_SOUND;
export const QUESTION = "Hello! Who are you?";
export const SCHEMA = {
  type: "object",
  properties: { city: { enum: ["Paris", "London"] }, warm: { type: "boolean" } },
  required: ["city", "warm"],
  additionalProperties: false,
};
const IDLE_TIMEOUT_MS = 20_000;
const queue = [];

export const says = (text) => `Please. SAY[[${text}]]`;
// With the spaces that the format has: once a call has begun, its frame is the only text that can follow.
export const saysCall = (name, args) => {
  const spaced = JSON.stringify(args).replaceAll(":", ": ").replaceAll(",", ", ");
  return says(`<tool_call>\n{"name": "${name}", "arguments": ${spaced}}\n</tool_call>`);
};

export const longReply = () => says("word ".repeat(2000));

export async function assertCancelled(url) {
  const end = Date.now() + IDLE_TIMEOUT_MS;
  for (;;) {
    const { requests } = await (await fetch(`${url}/localrun/v1/requests`)).json();
    if (requests.every((request) => ["done", "cancelled", "failed"].includes(request.state))) {
      assert.equal(requests.at(-1).state, "cancelled");
      return;
    }
    assert.ok(Date.now() < end, "the request goes on");
    await new Promise((wake) => setTimeout(wake, 50));
  }
}

export function check(name, body) {
  queue.push([name, body]);
  if (queue.length === 1) setImmediate(run);
}

async function run() {
  for (const [name, body] of queue) {
    let error = null;
    try {
      await body();
    } catch (caught) {
      error = `${caught?.stack ?? caught}`;
    }
    console.log(JSON.stringify({ check: name, error }));
  }
}
