// Conversations in this browser's localStorage, an entry for each, and what they are exported as. Pictures are kept in
// memory alone. What is read may be of another version, or damaged: only what has the right shape is taken.
//
// `nodes` are all turns of a conversation, the versions that were edited or answered again among them, and `turns` those
// that are shown. A turn knows the one that it follows (`parent`); stored, that is its number.

const ENTRY = "localrun.chat.";

// Storage may be full or forbidden, where even its name throws; the page works without. `keep` says whether it did.
export const kept = (store, name) => { try { return window[store].getItem(name); } catch { return null; } };
export function keep(store, name, value) {
  try { value === null ? window[store].removeItem(name) : window[store].setItem(name, value); return true; } catch { return false; }
}

export const isForbidden = () => { try { return !localStorage; } catch { return true; } };

export const newId = () => crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;

export const fresh = (model) => ({ id: newId(), name: "", at: Date.now(), model, system: "", sampling: {}, nodes: [], turns: [] });

// A turn after the last one that is shown.
export function add(chat, turn) {
  turn.parent = chat.turns.at(-1) ?? null;
  chat.nodes.push(turn);
  chat.turns.push(turn);
}

export const versions = (chat, turn) => chat.nodes.filter((other) => other.parent === turn.parent);

// The turns up to this one, and from there on the latest of each.
export function showVersion(chat, turn) {
  for (let next = turn; next; next = chat.nodes.findLast((other) => other.parent === turn)) turn = next;
  chat.turns = upTo(turn);
}

function upTo(turn) {
  const found = [];
  for (; turn; turn = turn.parent) found.unshift(turn);
  return found;
}

export function titleOf(chat) {
  const asked = chat.turns.find((turn) => turn.role === "user")?.content.trim().replace(/\s+/g, " ") ?? "";
  return chat.name || asked.replace(/^(.{60}).+/u, "$1…") || "New chat";
}

export const idOf = (storageName) => storageName?.startsWith(ENTRY) ? storageName.slice(ENTRY.length) : null;

export function read(id) {
  try { return checked(JSON.parse(kept("localStorage", ENTRY + id)), id); } catch { return null; }
}

// The newest first.
export function all() {
  let names = [];
  try { names = Object.keys(localStorage); } catch { /* forbidden */ }
  return names.map(idOf).filter((id) => id !== null).map(read).filter((chat) => chat).sort((one, other) => other.at - one.at);
}

// The heading that a conversation stands below in the list.
export function whenOf({ at }) {
  const midnight = (ms) => new Date(ms).setHours(0, 0, 0, 0);
  const days = Math.round((midnight(Date.now()) - midnight(at)) / 864e5);
  if (days < 2) return days < 1 ? "Today" : "Yesterday";
  if (days < 8) return "Last 7 days";
  return at ? new Date(at).toLocaleDateString("en", { month: "long", year: "numeric" }) : "Earlier";
}

export function write(chat) {
  chat.at = Date.now();
  const { nodes, ...rest } = chat, numbers = new Map(nodes.map((turn, number) => [turn, number]));
  const turns = nodes.map(({ pictures: _, parent, ...turn }) => ({ ...turn, parent: numbers.get(parent) ?? -1 }));
  return keep("localStorage", ENTRY + chat.id, JSON.stringify({ ...rest, turns, leaf: numbers.get(chat.turns.at(-1)) }));
}

export const remove = (id) => keep("localStorage", ENTRY + id, null);

function checked(value, id) {
  if (typeof value !== "object" || value === null) return null;
  const text = (one) => (typeof one === "string" ? one : "");
  const nodes = [], byNumber = [];
  for (const [number, turn] of (Array.isArray(value.turns) ? value.turns : []).entries()) {
    if (!["user", "assistant"].includes(turn?.role) || typeof turn.content !== "string") continue;
    const { role, content, thinking, model, problem, numbers } = turn;
    // Without a number it is of a version that kept one line of turns.
    const parent = Number.isInteger(turn.parent) ? byNumber[turn.parent] ?? null : nodes.at(-1) ?? null;
    nodes.push(byNumber[number] = { role, content, parent, ...(role === "user" ? {}
      : { thinking: text(thinking), model: text(model), problem: text(problem), numbers: text(numbers) }) });
  }
  const turns = upTo(byNumber[value.leaf] ?? nodes.at(-1));
  const sampling = Object.fromEntries(Object.entries(value.sampling ?? {}).filter(([, number]) => Number.isFinite(number)));
  return { id, name: text(value.name), at: Number(value.at) || 0, model: text(value.model), system: text(value.system), sampling, nodes, turns };
}

export function asJson(chat) {
  const turns = chat.turns.map(({ pictures: _, parent: __, ...rest }) => rest);
  return JSON.stringify({ title: titleOf(chat), model: chat.model, system: chat.system, sampling: chat.sampling, turns }, null, 2);
}

export function asMarkdown(chat) {
  const parts = [`# ${titleOf(chat)}`];
  if (chat.system) parts.push(`## System\n\n${chat.system}`);
  for (const turn of chat.turns) {
    parts.push(`## ${turn.role === "user" ? "You" : turn.model || "Answer"}\n\n${turn.content}`);
    if (turn.problem) parts.push(`*${turn.problem}*`);
  }
  return `${parts.join("\n\n")}\n`;
}
