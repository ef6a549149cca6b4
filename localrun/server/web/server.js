// What this page asks of its server, and the API key, which is kept in sessionStorage and so ends with the tab. The key
// goes to no other place than paths of this server, which are below where this file is: a proxy may have put it there.
import { keep, kept } from "./chats.js";

const KEY = "localrun.key";
let key = kept("sessionStorage", KEY);

export const hasKey = () => key !== null;

export async function ask(path, options = {}) {
  for (;;) {
    const sent = key;
    const headers = { "X-Localrun-Client": "web", ...options.headers, ...(sent ? { Authorization: `Bearer ${sent}` } : {}) };
    const answer = await fetch(new URL(`..${path}`, import.meta.url), { ...options, headers, mode: "same-origin", credentials: "omit", cache: "no-store", redirect: "error" }).catch((error) => {
      throw error instanceof TypeError ? new Error(`${location.host} does not answer; is the daemon running?`) : error;
    });
    if (answer.ok) return answer;
    let said = "";
    try { const { error } = await answer.json(); said = error.message ?? error; } catch { /* not JSON */ }
    if (answer.status === 401 && (await askForKey(sent ? said : ""))) continue;
    throw new Error(said || `the server answered ${answer.status}`);
  }
}

// `problem` says what is wrong with the key that was sent.
function askForKey(problem) {
  const [dialog, field, said] = ["key", "key-text", "key-problem"].map((id) => document.getElementById(id));
  said.textContent = problem;
  field.value = "";
  dialog.returnValue = "";
  if (!dialog.open) dialog.showModal();
  field.focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const given = dialog.returnValue === "use" ? field.value.replace(/[\s\u200b-\u200f\ufeff]/g, "") : "";
      setTimeout(() => { field.value = ""; });  // others may have asked meanwhile
      if (/[^!-~]/.test(given)) { resolve(askForKey("A key has only letters without accents, digits and signs.")); return; }
      if (given) keep("sessionStorage", KEY, key = given);
      resolve(dialog.returnValue === "use" && key !== null);
    }, { once: true });
  });
}

export const askJson = async (path) => (await ask(path)).json();

export const post = (path, body, options) => ask(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), ...options });
