// The chat page: models, conversations, and one answer at a time in each. Conversations are kept in this browser's
// localStorage (`chats.js`; pictures are not). What is asked of the server goes through `server.js`.
import * as chats from "./chats.js";
import { button, copyButton, element, show as showMarkdown } from "./markdown.js";
import { contextOf, listModels, sizeOf, takeModels } from "./models.js";
import { hasKey, post } from "./server.js";

const $ = (id) => document.getElementById(id);
const { keep, kept } = chats;
const log = $("log"), text = $("text"), model = $("model"), send = $("send");
const BUILT_IN = "tiny", MODEL = "localrun.model", THEME = "localrun.theme", DRAFT = "localrun.draft.", EDIT = "localrun.edit.";
const STOPPED = "Stopped.", CLOSED = "The page was closed.", MAX_PICTURE_BYTES = 10e6;
const MAX_ASKED = 4;  // answers at a time: two of a browser's six connections are left to its other tabs
const NARROW = matchMedia("(max-width: 50rem)");

let capabilities = {}, pictures = [];
let chat = chats.fresh(""), editedAt = null;
const runs = new Map();     // what ends the running answer of a conversation, by its id
let nAsked = 0, saidOfModels = "";
const open = new Map();     // conversations that were seen, with their pictures
const views = new Map();    // what shows a turn of this conversation

// --- the server ---

async function loadModels() {
  try {
    const usable = await listModels();
    const before = JSON.stringify(capabilities);
    capabilities = Object.fromEntries(usable.map((row) => [row.id, row.meta.capabilities]));
    sayOfModels(usable.length ? "" : "There is no model here that answers; pull one under Models, or with `localrun pull NAME`.");
    if (JSON.stringify(capabilities) === before) return;  // the list may be open
    model.replaceChildren(...usable.map((row) => element("option", { value: row.id, textContent: row.id + kindOf(row) })));
  } catch (error) {
    sayOfModels(`The models cannot be listed: ${error.message}`);
  }
  $("docs").hidden = hasKey();  // a link sends no key
  chooseModel();
}

function kindOf({ tier, meta: { size } }) {
  if (tier || !size) return tier ? " (tier)" : "";
  return ` (${sizeOf(size)})`;
}

function sayOfModels(said) {
  if (said || $("notice").textContent === saidOfModels) notice(said);
  saidOfModels = said;
}

// That of the conversation, or the one that answered last; the toy only where there is no other.
function chooseModel() {
  const names = Object.keys(capabilities);
  const wanted = [chat.model, kept("localStorage", MODEL), names.find((name) => name !== BUILT_IN)].find((name) => names.includes(name));
  if (wanted) model.value = wanted;
  modelChanged();
}

function modelChanged() {
  $("attach").hidden = !capabilities[model.value]?.includes("vision");
  if ($("attach").hidden && pictures.length) { pictures = []; showPictures(); }
}

// --- what is shown ---

function notice(said) {
  $("notice").textContent = said;
  $("notice").hidden = !said;
}

function show(turn) {
  log.querySelector(".greeting")?.remove();
  const isOwn = turn.role === "user";
  const said = element("div", { className: "said" });
  const numbers = element("span", { className: "numbers" });
  const again = isOwn ? button("Edit", "Edit this message", () => edit(turn)) : button("Again", "Answer again", () => answerAgain(turn));
  const acts = element("div", { className: "acts" }, ...versionButtons(turn), again, copyButton(() => turn.content), ...(isOwn ? [] : [numbers]));
  const made = element("article", { className: `turn ${turn.role}` });
  if (isOwn) {
    made.ariaLabel = "You";
    for (const url of turn.pictures ?? []) made.append(element("img", { src: url, alt: "attached picture" }));
    said.textContent = turn.content;
    made.append(said, acts);
  } else {
    const thinking = element("div"), details = element("details", { className: "thinking", hidden: true }, element("summary", { textContent: "Thinking" }), thinking);
    const by = element("p", { className: "by" }), problem = element("p", { className: "by", hidden: true });
    made.append(by, details, said, problem, acts);
    made.update = () => {
      made.ariaLabel = by.textContent = turn.model || "Answer";
      details.hidden = !turn.thinking;
      thinking.textContent = turn.thinking;
      showMarkdown(said, turn.content);
      problem.textContent = turn.problem ?? "";
      problem.classList.toggle("wrong", turn.problem !== STOPPED);
      problem.hidden = !turn.problem;
      numbers.textContent = turn.numbers ?? "";
    };
    made.isBusy = (is) => { said.classList.toggle("busy", is); made.ariaBusy = is; again.disabled = is; };
    made.update();
  }
  views.set(turn, made);
  log.append(made);
}

function versionButtons(turn) {
  const all = chats.versions(chat, turn), at = all.indexOf(turn);
  const go = (label, what, to) => button(label, what, () => showVersion(to, label), { disabled: !to });
  return all.length < 2 ? []
    : [go("‹", "Earlier version", all[at - 1]), element("span", { textContent: `${at + 1}/${all.length}` }), go("›", "Later version", all[at + 1])];
}

function showVersion(turn, label) {
  if (runs.has(chat.id)) return;
  stopEditing();
  chats.showVersion(chat, turn);
  save(chat);
  showChat(chat);
  const view = views.get(turn);
  view.scrollIntoView({ block: "nearest" });
  const arrows = [...view.querySelectorAll(".acts button:enabled")];
  (arrows.find((one) => one.textContent === label) ?? arrows[0]).focus();
}

function showChat(other) {
  chat = other;
  open.set(chat.id, chat);
  views.clear();
  log.replaceChildren();
  leaveEdit();
  showDraft();
  if (chat.turns.length) chat.turns.forEach(show);
  else log.append(element("div", { className: "greeting" }, element("b", { textContent: "What would you like to ask?" }), "Conversations are kept in this browser, pictures are not."));
  if (runs.has(chat.id)) views.get(chat.turns.at(-1))?.isBusy(true);
  if (location.hash.slice(1) !== chat.id) history[location.hash && history.state !== "list" ? "pushState" : "replaceState"](null, "", `#${chat.id}`);
  chooseModel();
  showRun();
  showList();
  toEnd();
  const [at, said] = JSON.parse(kept("sessionStorage", EDIT + chat.id) ?? "[]");
  if (chat.turns[at]?.role === "user") edit(chat.turns[at], said);
}

function showRun() {
  send.textContent = runs.has(chat.id) ? "Stop" : "Send";
  const isSet = chat.system || Object.keys(chat.sampling).length;
  $("setup").classList.toggle("set", Boolean(isSet));
}

const isAtEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 60;
const toEnd = () => { log.scrollTop = log.scrollHeight; };
let isRead = true;  // to its end, where it stays while the field below grows
log.addEventListener("scroll", () => { isRead = isAtEnd(); });
new ResizeObserver(() => { if (isRead) toEnd(); }).observe(log);

// If another tab wrote it while this one slept, it goes on as a copy.
function save(one) {
  if (chats.read(one.id)?.at > one.at) { part(one); return; }
  if (!chats.write(one)) notice(`This browser keeps ${chats.isForbidden() ? "nothing of this page;" : "no more; delete conversations, or"} export this one before the tab is closed.`);
  showList();
}

function showPictures() {
  $("pictures").replaceChildren(...pictures.map((url, index) => {
    const remove = button("", "Leave this picture out", () => { pictures.splice(index, 1); showPictures(); });
    remove.append(element("img", { src: url, alt: "" }));
    return remove;
  }));
}

// --- the list of conversations ---

function showList() {
  document.title = chat.turns.length ? `${chats.titleOf(chat)} · localrun` : "localrun";
  if ($("chats").querySelector("input")) return;  // a name is being typed, after which the list is shown anew
  const held = document.activeElement?.closest("#chats button");
  const known = chats.all();
  for (const one of open.values()) if (one.turns.length && !known.some(({ id }) => id === one.id)) known.unshift(one);  // no room
  const sought = $("find").value.trim().toLowerCase();
  const isFound = (one) => [chats.titleOf(one), ...one.nodes.map((turn) => turn.content)].some((said) => said.toLowerCase().includes(sought));
  const lists = new Map();
  for (const one of known.filter(isFound)) {
    const when = chats.whenOf(one);
    if (!lists.has(when)) lists.set(when, element("ul", { ariaLabel: when }));
    lists.get(when).append(rowOf(one));
  }
  $("chats").replaceChildren(...[...lists].flatMap(([when, list]) => [element("p", { textContent: when, ariaHidden: "true" }), list]));
  const isHeld = (one) => one.title === held.title && one.closest("li").dataset.id === held.closest("li").dataset.id;
  if (held) [...$("chats").querySelectorAll("button")].find(isHeld)?.focus({ preventScroll: true });
}
const focusList = () => ($("chats").querySelector("[aria-current]") ?? $("new")).focus();

function rowOf(one) {
  const isThis = one.id === chat.id;
  const title = button(chats.titleOf(one), chats.titleOf(one), () => { showChat(open.get(one.id) ?? one); closeList(); }, { className: "title" });
  const row = element("li", {}, title);
  row.dataset.id = one.id;
  if (!isThis) return row;
  title.ariaCurrent = "true";
  row.append(element("div", { className: "acts" },
    button("Rename", "Rename this conversation", () => rename(row, title)),
    button("Markdown", "Export as Markdown", () => download(chats.asMarkdown(chat), "md", "text/markdown")),
    button("JSON", "Export as JSON", () => download(chats.asJson(chat), "json", "application/json")),
    button("Delete", "Delete this conversation", () => { if (confirm(`Delete "${chats.titleOf(chat)}"?`)) { forget(chat.id); focusList(); } }),
  ));
  return row;
}

function rename(row, title) {
  const { id } = chat, field = element("input", { value: chats.titleOf(chat), ariaLabel: "Name of the conversation", maxLength: 120 });
  let isDone = false;
  const end = (takes) => {
    if (isDone) return;
    isDone = true;
    field.replaceWith(title);
    const renamed = open.get(id);  // not deleted, here or in another tab
    if (takes && renamed) { renamed.name = field.value.trim(); save(renamed); } else showList();
    focusList();
  };
  field.addEventListener("keydown", (event) => {
    if (isComposing(event) || !["Enter", "Escape"].includes(event.key)) return;
    event.stopPropagation();
    event.preventDefault();
    end(event.key === "Enter");
  });
  field.addEventListener("blur", () => end(true));
  title.replaceWith(field);
  field.select();
}

function forget(id) {
  runs.get(id)?.abort();
  open.delete(id);
  chats.remove(id);
  const [next = chats.fresh(model.value)] = chats.all();
  if (id === chat.id) showChat(open.get(next.id) ?? next);
}

function download(content, suffix, type) {
  const url = URL.createObjectURL(new Blob([content], { type }));
  const name = chats.titleOf(chat).replace(/[^\p{L}\p{M}\p{N} _-]+/gu, "").trim().replace(/^(.{60}).+/u, "$1") || "conversation";
  element("a", { href: url, download: `${name}.${suffix}` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

function toggleList(is) {
  const isNarrow = NARROW.matches;
  document.body.classList.toggle(isNarrow ? "listed" : "unlisted", isNarrow ? is : is === undefined ? undefined : !is);
  const isShown = isNarrow ? document.body.classList.contains("listed") : !document.body.classList.contains("unlisted");
  $("shade").hidden = !(isNarrow && isShown);
  $("list").ariaExpanded = String(isShown);
  if (isNarrow && isShown) history.pushState("list", "");  // which Back closes
  else if (!isShown && history.state === "list") history.back();
  if (isShown) focusList();
}
function closeList() {
  if (document.body.classList.contains("listed")) toggleList(false);
  text.focus();
}

// --- an answer ---

const forServer = (turn) => ({
  role: turn.role,
  content: turn.pictures?.length
    ? [...turn.pictures.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text: turn.content }]
    : turn.content,
});

function numbersOf({ startedAt, firstAt, nTokens, perSecond, usage, nContext }) {
  const now = performance.now();
  if (!firstAt) return `waiting ${((now - startedAt) / 1000).toFixed(1)} s`;
  const seconds = (now - firstAt) / 1000;
  const rate = perSecond ?? (nTokens > 1 && seconds > 0 ? (nTokens - 1) / seconds : null);
  return [...(rate ? [`${rate.toFixed(1)} tokens/s`] : []), `first token ${((firstAt - startedAt) / 1000).toFixed(2)} s`, `${nTokens} tokens`, ...promptOf(usage, nContext)].join(" · ");
}

function promptOf(usage, nContext) {
  const nCached = usage?.prompt_tokens_details?.cached_tokens;
  return [
    ...(usage ? [`prompt ${usage.prompt_tokens}${nCached ? ` (${nCached} cached)` : ""}`] : []),
    ...(nContext ? [`${Math.ceil(100 * usage.total_tokens / nContext)}% of the context`] : []),
  ];
}

// Of the conversation as it is now; it goes on while others are looked at.
async function answer(asking) {
  const asked = asking.turns.filter((turn) => turn.content || turn.role === "user").map(forServer);
  if (asking.system) asked.unshift({ role: "system", content: asking.system });
  const turn = { role: "assistant", content: "", thinking: "", model: asking.model, problem: "", numbers: "" };
  const numbers = { startedAt: performance.now(), firstAt: 0, nTokens: 0, perSecond: null };
  const run = new AbortController();
  chats.add(asking, turn);
  runs.set(asking.id, run);
  if (asking === chat) { show(turn); views.get(turn).isBusy(true); toEnd(); }
  showRun();
  $("status").textContent = "Answering";
  const draw = () => {
    const view = views.get(turn);
    if (!view) return;
    const follows = isAtEnd();
    view.update();
    if (follows) toEnd();
  };
  let drawing = 0, lastMs = 0;
  const drawSoon = () => {  // a long answer takes longer to draw, and is drawn less often
    drawing ||= setTimeout(() => requestAnimationFrame(() => {
      const from = performance.now();
      drawing = 0;
      draw();
      lastMs = performance.now() - from;
    }), 30 + 4 * lastMs);
  };
  const clock = setInterval(() => { turn.numbers = numbersOf(numbers); drawSoon(); }, 200);
  while (nAsked >= MAX_ASKED && !run.signal.aborted) await new Promise((go) => { setTimeout(go, 100); });
  nAsked += 1;
  try {
    const { think, ...sampling } = asking.sampling;
    const body = { model: asking.model, messages: asked, stream: true, stream_options: { include_usage: true }, ...sampling };
    if (think !== undefined) body.enable_thinking = think === 1;
    const response = await post("/v1/chat/completions", body, { signal: run.signal });
    if (asking.model !== BUILT_IN) keep("localStorage", MODEL, asking.model);
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message ?? "the answer broke off");
      turn.model = event.model ?? turn.model;
      const delta = event.choices?.[0]?.delta ?? {};
      if (delta.content || delta.reasoning_content) {
        numbers.firstAt ||= performance.now();
        numbers.nTokens += 1;
        turn.content += delta.content ?? "";
        turn.thinking += delta.reasoning_content ?? "";
        drawSoon();
      }
      if (event.choices?.[0]?.finish_reason === "length") turn.problem = "The longest answer was reached.";
      if (event.usage) {
        numbers.usage = event.usage;
        numbers.nTokens = event.usage.completion_tokens;
        numbers.perSecond = event.timings?.predicted_per_second ?? null;
      }
    }
    if (numbers.usage) numbers.nContext = await contextOf(turn.model);
  } catch (error) {
    turn.problem = error.name === "AbortError" ? STOPPED : isLeaving ? CLOSED : error.message;
  }
  nAsked -= 1;
  clearInterval(clock);
  clearTimeout(drawing);
  turn.numbers = numbers.firstAt ? numbersOf(numbers) : "";
  runs.delete(asking.id);
  views.get(turn)?.isBusy(false);
  draw();
  showRun();
  if (open.get(asking.id) === asking) save(asking);  // and was not deleted meanwhile
  $("status").textContent = turn.problem || `The answer is complete, ${numbers.nTokens} tokens`;
}

// The data of server-sent events, as JSON, until [DONE].
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      if (error instanceof TypeError) return { done: true };
      throw error;
    });
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
  if (runs.has(chat.id)) { runs.get(chat.id).abort(); return; }
  const content = text.value.trimEnd().replace(/^(?:[ \t]*\n)+/, "");
  if (!content && !pictures.length) return;
  if (!model.value) { loadModels(); return; }  // which asks for the key again, if that was it
  if (editedAt !== null) cutAt(editedAt);
  else keep("sessionStorage", DRAFT + chat.id, null);
  const turn = { role: "user", content, pictures };
  chats.add(chat, turn);
  chat.model = model.value;
  show(turn);
  stopEditing();
  showDraft();
  pictures = [];
  showPictures();
  notice("");
  save(chat);
  answer(chat);
});

// They stay in the conversation, as another version.
function cutAt(at) {
  for (const turn of chat.turns.splice(at)) { views.get(turn)?.remove(); views.delete(turn); }
}

function answerAgain(turn) {
  if (runs.has(chat.id) || !model.value) return;
  stopEditing();
  cutAt(chat.turns.indexOf(turn));
  chat.model = model.value;
  log.focus();  // the button is gone
  answer(chat);
}

function edit(turn, said = turn.content) {
  if (runs.has(chat.id)) return;
  stopEditing();
  editedAt = chat.turns.indexOf(turn);
  views.get(turn).classList.add("edited");
  $("editing").hidden = false;
  write(said);
  keepDraft();
  pictures = [...(turn.pictures ?? [])];
  showPictures();
  text.focus();
}

function stopEditing() {
  if (editedAt !== null) keep("sessionStorage", EDIT + chat.id, null);
  leaveEdit();
}

// It goes on where its conversation is opened again.
function leaveEdit() {
  if (editedAt === null) return;
  log.querySelector(".edited")?.classList.remove("edited");
  $("editing").hidden = true;
  editedAt = null;
  showDraft();
  pictures = [];
  showPictures();
}

// What is being written in each conversation outlives a reload and other conversations, and a draft outlives an edit.
const keepDraft = () => editedAt === null ? keep("sessionStorage", DRAFT + chat.id, text.value || null)
  : keep("sessionStorage", EDIT + chat.id, JSON.stringify([editedAt, text.value]));
const showDraft = () => write(kept("sessionStorage", DRAFT + chat.id) ?? "");

const write = (value) => { text.value = value; grow(); };

function grow() {
  if (CSS.supports("field-sizing", "content")) return;  // it does so by itself
  text.rows = 1;
  text.rows = Math.min(12, Math.floor(text.scrollHeight / 24));
}

text.addEventListener("input", () => {
  keepDraft();
  grow();
});

// Safari has ended the composition when its Enter comes.
const isComposing = (event) => event.isComposing || event.keyCode === 229;

text.addEventListener("keydown", (event) => {
  if (isComposing(event)) return;
  if (event.key === "ArrowUp" && !text.value) {
    const last = chat.turns.findLast((turn) => turn.role === "user");
    if (last) { event.preventDefault(); edit(last); }
  }
  // Keyboards on a screen have no Shift+Enter.
  if (event.key !== "Enter" || event.shiftKey || (matchMedia("(pointer: coarse)").matches && !event.ctrlKey && !event.metaKey)) return;
  event.preventDefault();
  if (!runs.has(chat.id)) $("form").requestSubmit();
});

document.addEventListener("keydown", (event) => {
  if (isComposing(event) || document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") {
    if (event.target === $("find") && $("find").value) { $("find").value = ""; showList(); return; }
    if (document.body.classList.contains("listed")) closeList();
    else if (editedAt !== null) stopEditing();
    else runs.get(chat.id)?.abort();
  }
  if (event.altKey && event.code === "KeyN") { event.preventDefault(); $("new").click(); }
  if (event.altKey && event.code === "KeyL") { event.preventDefault(); toggleList(); }
});

send.addEventListener("click", (event) => { if (event.detail > 1) event.preventDefault(); });  // a double click is no Stop
$("new").addEventListener("click", () => {
  if (chat.turns.length) showChat(chats.fresh(model.value));
  closeList();
});
$("find").addEventListener("input", showList);
$("list").addEventListener("click", () => toggleList());
$("shade").addEventListener("click", closeList);

$("setup").addEventListener("click", () => {
  $("system").value = chat.system;
  for (const field of $("settings").querySelectorAll("input, select")) field.value = chat.sampling[field.name] ?? "";
  $("settings").returnValue = "";
  $("settings").showModal();
});
$("settings").addEventListener("close", () => {
  if ($("settings").returnValue !== "use") return;
  chat.system = $("system").value.trim();
  chat.sampling = Object.fromEntries([...$("settings").querySelectorAll("input, select")].filter((field) => field.value !== "").map((field) => [field.name, Number(field.value)]));
  if (chat.turns.length) save(chat);
  showRun();
});

$("theme").addEventListener("click", () => {
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme ?? (isDark ? "dark" : "light");
  setTheme(now === "dark" ? "light" : "dark");
});
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  keep("localStorage", THEME, theme);
}

takeModels(loadModels, (name) => { model.value = name; model.dispatchEvent(new Event("change")); });
model.addEventListener("change", () => {
  chat.model = model.value;
  if (chat.turns.length) save(chat);
  modelChanged();
});
$("attach").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async () => {
  for (const file of $("file").files) await addPicture(file);
  $("file").value = "";
});
for (const kind of ["paste", "dragover", "drop"]) document.addEventListener(kind, async (event) => {
  const given = event.clipboardData ?? event.dataTransfer;
  if (!given.types.includes("Files") || (kind === "paste" && given.types.includes("text/plain"))) return;
  event.preventDefault();
  for (const file of [...given.files]) await addPicture(file);
});

async function addPicture(file) {
  if (!$("file").accept.split(",").includes(file.type)) { notice(`${file.name} is no PNG, JPEG, WebP or GIF file`); return; }
  if ($("attach").hidden) { notice(`${model.value || "This model"} does not see pictures; choose a model that does`); return; }
  if (file.size > MAX_PICTURE_BYTES) { notice(`${file.name} is larger than 10 MB; choose a smaller picture`); return; }
  pictures.push(await new Promise((resolve) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.readAsDataURL(file);
  }));
  showPictures();
}

// A browser may cut the connections before it hides the page. What only looks like leaving, such as a link to an
// address for mail, ends no answer.
let isLeaving = false;
addEventListener("beforeunload", () => {
  isLeaving = true;
  setTimeout(() => { isLeaving = false; }, 1000);
});
// A page that is closed keeps what came of its answers.
addEventListener("pagehide", () => {
  for (const [id, run] of runs) {
    const answering = open.get(id);
    if (!answering) continue;  // it was deleted a moment ago
    answering.turns.at(-1).problem = CLOSED;
    save(answering);
    run.abort(new Error(CLOSED));
  }
});

// In the browser's history nothing told it of other tabs.
addEventListener("pageshow", (event) => { if (event.persisted) location.reload(); });
addEventListener("popstate", () => {
  if (document.body.classList.contains("listed")) closeList();
  if (location.hash.slice(1) !== chat.id) showChat(chatHere());
});
// A model may have been pulled or deleted meanwhile.
addEventListener("focus", () => { if (model.value) loadModels(); });

// The conversation that the address names, or a new one of that name.
function chatHere() {
  const id = location.hash.slice(1);
  return open.get(id) ?? chats.read(id) ?? { ...chats.fresh(model.value), ...(id && { id }) };
}

// Another tab wrote or deleted a conversation.
addEventListener("storage", (event) => {
  const id = chats.idOf(event.key);
  if (id === null) return;
  const ours = open.get(id);
  open.delete(id);
  if (ours && event.newValue !== null && (runs.has(id) || (ours === chat && editedAt !== null))) { part(ours); return; }
  runs.get(id)?.abort();
  if (id === chat.id) showChat(chats.read(id) ?? chats.fresh(model.value));
  else showList();
});

// What is being answered or edited here while another tab goes on with it becomes a conversation of its own, so that
// neither tab overwrites the other's turns.
function part(ours) {
  const run = runs.get(ours.id);
  open.delete(ours.id);
  runs.delete(ours.id);
  ours.id = chats.newId();
  open.set(ours.id, ours);
  if (run) runs.set(ours.id, run);
  if (ours === chat) {
    history.replaceState(null, "", `#${ours.id}`);
    notice("Another tab went on with this conversation; here it goes on as a copy.");
  }
  save(ours);
}

NARROW.addEventListener("change", () => {
  document.body.classList.remove("listed", "unlisted");
  $("shade").hidden = true;
  $("list").ariaExpanded = String(!NARROW.matches);
});

if (["light", "dark"].includes(kept("localStorage", THEME))) setTheme(kept("localStorage", THEME));
$("list").ariaExpanded = String(!NARROW.matches);
showChat(location.hash ? chatHere() : chats.all()[0] ?? chatHere());
loadModels();
