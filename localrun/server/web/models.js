// The dialog of models: those that are here and what is loaded of them, what is being pulled, and how busy the server is.
// While it is open it looks once a second.
import { button, element, show } from "./markdown.js";
import { ask, askJson, post } from "./server.js";

const EVERY_MS = 1000;
const ABILITIES = { vision: "sees", audio: "hears", thinking: "thinks", tools: "calls tools" };
const $ = (id) => document.getElementById(id);
let here = [], listAgain, choose;

export const sizeOf = (bytes) => bytes < 1e9 ? `${Math.ceil(bytes / 1e6)} MB` : `${(bytes / 1e9).toFixed(1)} GB`;

// Those that answer; adapters are not among them.
export async function listModels() {
  const { data } = await askJson("/v1/models");
  return here = data.filter((row) => row.meta.capabilities.includes("completion") && !row.parent);
}

// How many tokens a conversation with this model may have, where that can be told.
export async function contextOf(model) {
  try { return (await askJson("/localrun/v1/snapshot")).engines.find((one) => one.model === model)?.n_ctx; } catch { return undefined; }
}

// `again` lists the models anew, `chosen` is told one's name.
export function takeModels(again, chosen) { [listAgain, choose] = [again, chosen]; }

async function look() {
  try {
    const [{ aggregate: all, engines, system, version }, { pulls }] = await Promise.all(["snapshot", "pulls"].map((what) => askJson(`/localrun/v1/${what}`)));
    const free = `${sizeOf(system.memory_available_bytes)} of ${sizeOf(system.memory_total_bytes)} of memory free`;
    $("load").textContent = `${all.running} answering, ${all.queued} waiting · ${all.decode_tokens_per_s.toFixed(1)} tokens/s · ${free} · localrun ${version}`;
    show($("pulls"), "", element("ul", {}, ...pulls.filter(({ state }) => ["planning", "pulling"].includes(state)).map(pullRow)));
    show($("here"), "", element("ul", {}, ...here.map((row) => modelRow(row, engines.find((one) => one.model === row.id)))));
  } catch (error) {
    say(error);
  }
}

const say = (error) => { $("models-problem").textContent = error?.message ?? ""; };

function pullRow({ model, status, total_bytes: total, completed_bytes: done, bytes_per_s: rate }) {
  const said = total ? `${sizeOf(done)} of ${sizeOf(total)} · ${sizeOf(rate)}/s` : status;
  const bar = element("progress", { max: total || 1, value: done, ariaLabel: `How much of ${model} is here` });
  return rowOf(model, said, [bar], button("Stop", `Stop pulling ${model}`, () => act(() => ask(`/localrun/v1/pulls?model=${encodeURIComponent(model)}`, { method: "DELETE" }))));
}

function modelRow({ id, meta }, engine) {
  const facts = [
    meta.size && sizeOf(meta.size), meta.n_ctx_train && `${meta.n_ctx_train.toLocaleString("en")} tokens`,
    ...meta.capabilities.map((one) => ABILITIES[one]), engine && `${engine.state === "ready" ? "loaded" : engine.state}, ${sizeOf(engine.size_bytes)}`,
  ];
  return rowOf(id, facts.filter(Boolean).join(" · "), [],
    button("Use", `Use ${id}`, () => { choose(id); $("models").close(); }),
    ...(engine ? [button("Unload", `Unload ${id}`, () => act(() => post("/models/unload", { model: id })))] : []));
}

// `show` keeps buttons as they are: a row of another model is another row.
function rowOf(name, said, more, ...buttons) {
  const made = element("li", {}, element("div", {}, element("b", { textContent: name }), element("span", { textContent: said }), ...more), ...buttons);
  made.dataset.model = name;
  return made;
}

async function act(asked) {
  try {
    say(null);
    await asked();
  } catch (error) {
    say(error);
  }
  look();
}

async function pull(model) {
  const reader = (await post("/api/pull", { model })).body.pipeThrough(new TextDecoderStream()).getReader();
  let last = "", rest = "";
  for (let piece; !(piece = await reader.read().catch(() => ({ done: true }))).done;) {
    const lines = (rest + piece.value).split("\n");
    rest = lines.pop();
    last = lines.at(-1) ?? last;
  }
  const { status, error } = JSON.parse(last || "{}");
  if (status !== "success") throw new Error(error ?? `${model}: the connection broke; pull it again to go on`);
  await listAgain();
}

$("pick").addEventListener("click", async () => {
  say(null);
  $("models").showModal();
  const timer = setInterval(look, EVERY_MS);
  $("models").addEventListener("close", () => clearInterval(timer), { once: true });
  await listAgain();
  look();
  if ($("catalogue").childElementCount > 1) return;
  const { models } = await askJson("/localrun/v1/catalog").catch(() => ({ models: [] }));
  $("catalogue").append(...models.map(({ name, use, memory_gb: needed }) => element("option", { value: name, textContent: `${name} · ${needed} GB of memory · ${use}` })));
});
$("catalogue").addEventListener("change", () => { $("pulled").value = $("catalogue").value; });

$("pull").addEventListener("submit", (event) => {
  event.preventDefault();
  const model = $("pulled").value.trim();
  $("pulled").value = $("catalogue").value = "";
  act(() => pull(model));
  setTimeout(look, 200);
});
