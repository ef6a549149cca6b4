// The chat page: models, one conversation, one answer at a time. The conversation is kept in this browser's localStorage
// (the text; pictures are not), the API key in sessionStorage, which ends with the tab.
import { element, markdown } from "/web/markdown.js";

const $ = (id) => document.getElementById(id);
const log = $("log"), text = $("text"), model = $("model"), send = $("send");
const CHAT = "localrun.chat", MODEL = "localrun.model", THEME = "localrun.theme", KEY = "localrun.key";
const MAX_PICTURE_BYTES = 10e6;

let turns = [], capabilities = {}, pictures = [], running = null;

// Storage may be full or forbidden; the page works without.
const kept = (store, name) => { try { return store.getItem(name); } catch { return null; } };
function keep(store, name, value) {
  try { value === null ? store.removeItem(name) : store.setItem(name, value); } catch { /* nothing is kept then */ }
}

// --- the server ---

async function ask(path, options = {}) {
  for (;;) {
    const key = kept(sessionStorage, KEY);
    const headers = { "X-Localrun-Client": "web", ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const answer = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
    if (answer.ok) return answer;
    let said = "";
    try { said = (await answer.json()).error?.message ?? ""; } catch { /* not JSON */ }
    if (answer.status === 401 && (await askForKey(key ? said : ""))) continue;
    throw new Error(said || `the server answered ${answer.status}`);
  }
}

// `problem` says what is wrong with the key that was sent.
function askForKey(problem) {
  const dialog = $("key"), field = $("key-text");
  $("key-problem").textContent = problem;
  field.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  field.focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const isGiven = dialog.returnValue === "use" && field.value.trim() !== "";
      if (isGiven) keep(sessionStorage, KEY, field.value.trim());
      field.value = "";
      resolve(isGiven);
    }, { once: true });
  });
}
// Enter is the first button of a form otherwise, which is Cancel.
$("key-text").addEventListener("keydown", (event) => {
  if (event.key === "Enter") { event.preventDefault(); $("key").close("use"); }
});

async function loadModels() {
  try {
    const { data } = await (await ask("/v1/models")).json();
    const usable = data.filter((row) => row.meta.capabilities.includes("completion") && !row.parent);
    capabilities = Object.fromEntries(usable.map((row) => [row.id, row.meta.capabilities]));
    model.replaceChildren(...usable.map((row) => element("option", { value: row.id, textContent: row.tier ? `${row.id} (tier)` : row.id })));
    const last = kept(localStorage, MODEL);
    if (last in capabilities) model.value = last;
    notice(usable.length ? "" : "There is no model here that answers; pull one with `localrun pull NAME`.");
  } catch (error) {
    notice(`The models cannot be listed: ${error.message}`);
  }
  modelChanged();
}

function modelChanged() {
  $("attach").hidden = !capabilities[model.value]?.includes("vision");
  if ($("attach").hidden && pictures.length) { pictures = []; showPictures(); }
  if (model.value) keep(localStorage, MODEL, model.value);
}

// --- what is shown ---

function notice(said) {
  $("notice").textContent = said;
  $("notice").hidden = !said;
}

function show(turn) {
  log.querySelector(".greeting")?.remove();
  const said = element("div", { className: "said" });
  const made = element("div", { className: `turn ${turn.role}` });
  if (turn.role === "user") {
    for (const url of turn.pictures ?? []) made.append(element("img", { src: url, alt: "attached picture" }));
    said.textContent = turn.content;
    made.append(said);
  } else {
    const thinking = element("div"), details = element("details", { className: "thinking", hidden: true }, element("summary", { textContent: "Thinking" }), thinking);
    const by = element("p", { className: "by" });
    made.append(by, details, said);
    made.update = () => {
      by.textContent = turn.model ?? "";
      details.hidden = !turn.thinking;
      thinking.textContent = turn.thinking ?? "";
      said.replaceChildren(markdown(turn.content));
      made.querySelector(".wrong")?.remove();
      if (turn.problem) made.append(element("p", { className: "by wrong", textContent: turn.problem }));
    };
    made.update();
  }
  log.append(made);
  return made;
}

function greet() {
  log.replaceChildren(element("div", { className: "greeting" }, element("b", { textContent: "What would you like to ask?" }), "The conversation is kept in this browser, pictures are not."));
}

const isAtEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 60;
const toEnd = () => { log.scrollTop = log.scrollHeight; };

function save() {
  keep(localStorage, CHAT, JSON.stringify(turns.map(({ pictures: _, ...rest }) => rest)));
}

function showPictures() {
  $("pictures").replaceChildren(...pictures.map((url, index) => {
    const remove = element("button", { type: "button", title: "Leave it out" }, element("img", { src: url, alt: "picture to send; click leaves it out" }));
    remove.addEventListener("click", () => { pictures.splice(index, 1); showPictures(); });
    return remove;
  }));
}

function showNumbers({ startedAt, firstAt, nTokens, perSecond }) {
  const parts = [];
  if (firstAt) {
    const seconds = (performance.now() - firstAt) / 1000;
    const rate = perSecond ?? (nTokens > 1 && seconds > 0 ? (nTokens - 1) / seconds : null);
    if (rate) parts.push(`${rate.toFixed(1)} tokens/s`);
    parts.push(`first token ${((firstAt - startedAt) / 1000).toFixed(2)} s`, `${nTokens} tokens`);
  } else {
    parts.push(`waiting ${((performance.now() - startedAt) / 1000).toFixed(1)} s`);
  }
  $("numbers").textContent = parts.join(" · ");
}

// --- an answer ---

const forServer = (turn) => ({
  role: turn.role,
  content: turn.pictures?.length
    ? [...turn.pictures.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text: turn.content }]
    : turn.content,
});

async function answer() {
  const asked = turns.filter((turn) => turn.content || turn.role === "user").map(forServer);
  const turn = { role: "assistant", content: "", thinking: "", model: model.value };
  turns.push(turn);
  const shown = show(turn), numbers = { startedAt: performance.now(), firstAt: 0, nTokens: 0, perSecond: null };
  shown.querySelector(".said").classList.add("busy");
  toEnd();
  running = new AbortController();
  send.textContent = "Stop";
  const clock = setInterval(() => showNumbers(numbers), 200);
  let isDrawing = false;
  const draw = () => {
    if (isDrawing) return;
    isDrawing = true;
    requestAnimationFrame(() => {
      isDrawing = false;
      const follows = isAtEnd();
      shown.update();
      if (follows) toEnd();
    });
  };
  try {
    const body = { model: model.value, messages: asked, stream: true, stream_options: { include_usage: true } };
    const response = await ask("/v1/chat/completions", {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal: running.signal,
    });
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message ?? "the answer broke off");
      turn.model = event.model ?? turn.model;
      const delta = event.choices?.[0]?.delta ?? {};
      if (delta.content || delta.reasoning_content) {
        numbers.firstAt ||= performance.now();
        numbers.nTokens += 1;
        turn.content += delta.content ?? "";
        turn.thinking += delta.reasoning_content ?? "";
        draw();
      }
      if (event.usage) {
        numbers.nTokens = event.usage.completion_tokens;
        numbers.perSecond = event.timings?.predicted_per_second ?? null;
      }
    }
  } catch (error) {
    turn.problem = error.name === "AbortError" ? "Stopped." : error.message;
  }
  clearInterval(clock);
  showNumbers(numbers);
  running = null;
  send.textContent = "Send";
  shown.querySelector(".said").classList.remove("busy");
  const follows = isAtEnd();
  shown.update();
  if (follows) toEnd();
  save();
}

// The data of server-sent events, as JSON, until [DONE].
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the connection broke before the answer was complete");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

// --- what people do ---

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) { running.abort(); return; }
  const content = text.value.trim();
  if (!content && !pictures.length) return;
  if (!model.value) { loadModels(); return; }  // which asks for the key again, if that was it
  const turn = { role: "user", content, pictures };
  turns.push(turn);
  show(turn);
  text.value = "";
  pictures = [];
  showPictures();
  notice("");
  save();
  answer();
});

text.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!running) $("form").requestSubmit();
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !$("key").open) running.abort();
  if (event.altKey && event.code === "KeyN") { event.preventDefault(); $("new").click(); }
});

$("new").addEventListener("click", () => {
  running?.abort();
  turns = [];
  keep(localStorage, CHAT, null);
  $("numbers").textContent = "";
  greet();
  text.focus();
});

$("theme").addEventListener("click", () => {
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme ?? (isDark ? "dark" : "light");
  setTheme(now === "dark" ? "light" : "dark");
});
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  keep(localStorage, THEME, theme);
}

model.addEventListener("change", modelChanged);
$("attach").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async () => {
  for (const file of $("file").files) await addPicture(file);
  $("file").value = "";
});
text.addEventListener("paste", async (event) => {
  const files = [...event.clipboardData.files].filter((file) => file.type.startsWith("image/"));
  if (!files.length || $("attach").hidden) return;
  event.preventDefault();
  for (const file of files) await addPicture(file);
});

async function addPicture(file) {
  if (file.size > MAX_PICTURE_BYTES) { notice(`${file.name} is larger than 10 MB; choose a smaller picture`); return; }
  pictures.push(await new Promise((resolve) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.readAsDataURL(file);
  }));
  showPictures();
}

if (kept(localStorage, THEME)) setTheme(kept(localStorage, THEME));
try { turns = JSON.parse(kept(localStorage, CHAT) ?? "[]"); } catch { turns = []; }
if (!Array.isArray(turns)) turns = [];
turns.length ? turns.forEach(show) : greet();
toEnd();
loadModels();
