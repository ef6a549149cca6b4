// Conversations in this browser's localStorage, an entry for each, and what they are exported as. Pictures are kept in
// memory alone. What is read may be of another version, or damaged: only what has the right shape is taken.

const ENTRY = "localrun.chat.";
const FORMER = "localrun.chat";  // of the one conversation that there was before

// Storage may be full or forbidden, where even its name throws; the page works without. `keep` says whether it did.
export const kept = (store, name) => { try { return window[store].getItem(name); } catch { return null; } };
export function keep(store, name, value) {
  try { value === null ? window[store].removeItem(name) : window[store].setItem(name, value); return true; } catch { return false; }
}

export const newId = () => crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;

export const fresh = (model) => ({ id: newId(), name: "", at: Date.now(), model, system: "", sampling: {}, turns: [] });

export function titleOf(chat) {
  const asked = chat.turns.find((turn) => turn.role === "user")?.content.trim().replace(/\s+/g, " ") ?? "";
  return chat.name || (asked.length > 60 ? `${asked.slice(0, 60)}…` : asked) || "New chat";
}

export const idOf = (storageName) => storageName?.startsWith(ENTRY) ? storageName.slice(ENTRY.length) : null;

export function read(id) {
  try { return checked(JSON.parse(kept("localStorage", ENTRY + id)), id); } catch { return null; }
}

// The newest first.
export function all() {
  takeFormer();
  let names = [];
  try { names = Object.keys(localStorage); } catch { /* forbidden */ }
  return names.map(idOf).filter((id) => id !== null).map(read).filter((chat) => chat).sort((one, other) => other.at - one.at);
}

export function write(chat) {
  chat.at = Date.now();
  const turns = chat.turns.map(({ pictures: _, ...rest }) => rest);
  return keep("localStorage", ENTRY + chat.id, JSON.stringify({ ...chat, turns }));
}

export const remove = (id) => keep("localStorage", ENTRY + id, null);

function checked(value, id) {
  if (typeof value !== "object" || value === null) return null;
  const text = (one) => (typeof one === "string" ? one : "");
  const turns = (Array.isArray(value.turns) ? value.turns : [])
    .filter((turn) => ["user", "assistant"].includes(turn?.role) && typeof turn.content === "string")
    .map(({ role, content, thinking, model, problem, numbers }) => (role === "user" ? { role, content }
      : { role, content, thinking: text(thinking), model: text(model), problem: text(problem), numbers: text(numbers) }));
  const sampling = Object.fromEntries(Object.entries(value.sampling ?? {}).filter(([, number]) => Number.isFinite(number)));
  return { id, name: text(value.name), at: Number(value.at) || 0, model: text(value.model), system: text(value.system), sampling, turns };
}

function takeFormer() {
  try {
    const turns = JSON.parse(kept("localStorage", FORMER));
    const chat = checked({ turns }, fresh("").id);
    if (!chat?.turns.length || write(chat)) keep("localStorage", FORMER, null);
  } catch { /* not ours */ }
}

export function asJson(chat) {
  const turns = chat.turns.map(({ pictures: _, ...rest }) => rest);
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
