// Markdown as DOM nodes, by CommonMark's rules. Text of a model is only ever the text of a node, never HTML, and a link is
// only made of an http, https or mailto address; so whatever a model writes, the page has no other elements than those
// named here. Pictures, HTML, formulas and stars of globs, powers and products stay text: nothing that was said is lost.

const FENCE = /^[ \t]*(`{3,}(?=[^`]*$)|~{3,})\s*([\w+#.-]*)/;
const ITEM = /^([ \t]*)([-*+]|(\d{1,9})[.)])(?:([ \t]+)(.*)|$)/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(\S.*)$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const NOTE = /^ {0,3}\[\^([^\]\s]{1,60})\]:[ \t]*(.*)$/;
const UNDERLINE = /^ {0,3}(={3,}|-{3,})[ \t]*$/;
const DELIMITERS = /^\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?$/;
const MAX_DEPTH = 20, MAX_OPEN_MARKS = 30, MAX_MARKS = 8;
// Leftmost first. Lengths are bounded, for a model may repeat anything without end.
const TOKEN = new RegExp([
  /\\([*_`~#<>+.|$&-])/,  // escaped
  /(`+)/,
  // Formulas and __names__, as they are.
  /(\\\\|\\\([^]{1,1000}?\\\)|\\\[[^]{1,1000}?\\\]|\$\$[^]{1,1000}?\$\$|\$(?![\s$])[^$\n]{0,300}[^$\s]\$(?![\d$])|\b__[a-z\d_]{1,99}__\b)/,
  /(\*+|_+|~+)/, /\[\^([^\]\s]{1,60})\]/, /(!?\[)/, /(\])/, /(\\?\n|<br ?\/?>)/,
  /<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/, /(https?:\/\/(?:\[[\da-f:]{2,40}\])?(?![.,:;!?'"*_~])(?:[^\s<>()[\]`，。、；：！？）】」』]|\([^\s<>()]{0,200}\)){1,2000})/,
  /&(?:(amp|lt|gt|quot|apos|nbsp)|#([1-9]\d{0,4}|x[1-9a-f][\da-f]{0,3}));/,
].map((part) => part.source).join("|"), "g");
const TARGET = /\(\s*(?:<([^<>\n]{1,2000})>|((?:[^\s()\\]|\\.|\([^\s()]{0,200}\)){1,2000}))(?:\s+(?:"([^"]{0,500})"|'([^']{0,500})'))?\s*\)/y;
// With what stands beside them: stars of globs, products and powers.
const STARS = /^(?:\/\*(?!\*)|[^\W_]\*[^\W_]|[^]\*\.\w|\/\*\*\/|[^]\*\*\/\*|\w\*\*\d|\d\*\*\w)/;
const NAMED = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
// CommonMark does not let marks end before a letter; Chinese, Japanese and Korean have no blanks between words.
const UNSPACED = /[\p{scx=Han}\p{scx=Hira}\p{scx=Kana}\p{scx=Hang}]/u;

export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

export const button = (label, what, act, properties = {}) => {
  const made = element("button", { type: "button", textContent: label, title: what, ariaLabel: what, ...properties });
  made.addEventListener("click", act);
  return made;
};

// Nodes that are what they were stay, with what is selected in them and the focus; so does the button of code that grows.
export function show(parent, text, made = markdown(text)) {
  const wanted = [...made.childNodes];
  wanted.forEach((node, at) => {
    const there = parent.childNodes[at];
    if (!there) parent.append(node);
    else if (there.nodeName === "BUTTON" || there.isEqualNode(node)) return;
    else if (there.nodeType === Node.ELEMENT_NODE && there.cloneNode().isEqualNode(node.cloneNode())) show(there, "", node);
    else there.replaceWith(node);
  });
  while (parent.childNodes.length > wanted.length) parent.lastChild.remove();
}

// Footnotes of the text that is read: with a mark and a note, for `[^0-9]` alone is a pattern.
let notes = new Set();
const noteOf = (line) => { const found = NOTE.exec(line); return found && notes.has(found[1]) ? found : null; };

export function markdown(text) {
  const lines = text.split(/\r\n?|[\n\u2028\u2029]/), marks = new Set([...text.matchAll(/\[\^([^\]\s]{1,60})\](?!:)/g)].map(([, name]) => name));
  notes = new Set(lines.map((line) => NOTE.exec(line)?.[1]).filter((name) => marks.has(name)));
  return blocks(lines, 0, false);
}

// Within an item, fences and items may be indented as far as they like: models count its blanks in many ways.
function blocks(lines, depth, isItem) {
  const made = document.createDocumentFragment();
  const item = (line) => (depth < MAX_DEPTH && (isItem || indentOf(line) < 4) && !RULE.test(line) ? ITEM.exec(line) : null);
  for (let at = 0; at < lines.length;) {
    const line = lines[at], from = at, inside = [], isDeep = indentOf(line) >= 4, fence = isItem || !isDeep ? FENCE.exec(line) : null;
    if (!line.trim()) at++;
    else if (fence) {
      while (++at < lines.length && !closes(lines[at], fence)) inside.push(strip(lines[at], indentOf(line)));
      at++;
      made.append(codeBlock(inside.join("\n"), fence[2]));
    } else if (isDeep && !item(line)) {
      for (; at < lines.length && (!lines[at].trim() || indentOf(lines[at]) >= 4); at++) inside.push(strip(lines[at], 4));
      made.append(codeBlock(inside.join("\n").trimEnd(), ""));
    } else if (RULE.test(line)) {
      at++;
      made.append(element("hr"));
    } else if (HEADING.test(line)) {
      const [, marks, title] = HEADING.exec(lines[at++]);
      made.append(element(`h${Math.min(marks.length, 4)}`, {}, inline(title.trimEnd().replace(/\s#+$/, ""))));
    } else if (isTable(lines, at)) {
      for (at += 2; lines[at]?.trim() && lines[at].includes("|");) at++;
      made.append(table(lines.slice(from, at)));
    } else if (item(line)) {
      const [, , sign, number] = item(line), list = element(number ? "ol" : "ul", { dir: "auto", ...(number ? { start: Number(number) } : {}) });
      for (let next; (next = item(lines[at] ?? ""))?.[2].at(-1) === sign.at(-1);) at = addItem(list, lines, at, next, depth);
      made.append(list);
    } else if (noteOf(line) && depth < MAX_DEPTH) {
      const [, name, first] = noteOf(line);
      inside.push(first);
      at = gather(lines, at + 1, inside, (next) => (next.trim() && indentOf(next) < 4 ? null : strip(next, 4)));
      made.append(element("div", { className: "note" }, element("sup", { textContent: name }), element("div", {}, blocks(inside, depth + 1, false))));
    } else if (QUOTE.test(line) && depth < MAX_DEPTH) {
      at = gather(lines, at, inside, (next) => QUOTE.exec(next)?.[1] ?? null);
      made.append(element("blockquote", {}, blocks(inside, depth + 1, false)));
    } else {
      do inside.push(lines[at++].trim());
      while (lines[at]?.trim() && !UNDERLINE.test(lines[at]) && !isTable(lines, at) && !begins(lines[at], isItem, true));
      const below = UNDERLINE.exec(lines[at] ?? "")?.[1][0];
      if (below) at++;
      made.append(element({ "=": "h1", "-": "h2" }[below] ?? "p", {}, inline(inside.join("\n"))));
    }
  }
  return made;
}

function addItem(list, lines, at, [, before, sign, number, blanks = "", first = ""], depth) {
  const indent = indentOf(before), column = indent + sign.length, padding = indentOf(blanks, column);
  const isCode = padding > 4 && first;
  let width = column + (isCode || !first ? 1 : padding);
  const box = /^\[([ xX])\] (?=\S)/.exec(first);
  const inside = [isCode ? " ".repeat(padding - 1) + first : box ? `${box[1] === " " ? "☐" : "☑"} ${first.slice(4)}` : first];
  const end = gather(lines, at + 1, inside, (line) => {
    if (line.trim() && indentOf(line) < Math.min(width, indent + 2)) return null;
    if (line.trim()) width = Math.min(width, indentOf(line));
    return strip(line, width);
  });
  const content = blocks(inside, depth + 1, true), start = content.firstElementChild;
  if (start?.tagName === "P") start.replaceWith(...start.childNodes);  // as all other items have it
  list.append(element("li", number && Number(number) !== list.start ? { value: Number(number) } : {}, content));
  return end;
}

// Puts into `inside` what `take` gives of the lines from `at` on, and those that only go on with the paragraph above them.
function gather(lines, at, inside, take) {
  let fence = null;
  const look = (line) => { fence = !fence ? FENCE.exec(line) : closes(line, fence) ? null : fence; };
  inside.forEach(look);
  for (; at < lines.length; at++) {
    const mine = take(lines[at]), above = inside.at(-1) ?? "";
    if (mine === null && (fence || !lines[at].trim() || !above.trim() || [FENCE, HEADING, RULE].some((known) => known.test(above)) || begins(lines[at], true, false))) break;
    inside.push(mine ?? lines[at].trim());
    look(inside.at(-1));
  }
  while (inside.length > 1 && !inside.at(-1).trim()) inside.pop();
  return at;
}

// Whether a line ends the paragraph above it. Only the first of a list does within a text: "in the year⏎1986. There".
function begins(line, isItem, isWithin) {
  if (!isItem && indentOf(line) >= 4) return false;
  const [found, , , number = "1", , content] = ITEM.exec(line) ?? [];
  return [FENCE, HEADING, RULE, QUOTE].some((known) => known.test(line)) || Boolean(noteOf(line)) || Boolean(found && (!isWithin || content && (isItem || Number(number) === 1)));
}

// Columns of white space before a text that stands in that column; a tab goes to the next multiple of four.
function indentOf(text, column = 0) {
  let to = column;
  for (const sign of text) if (sign === " ") to++; else if (sign === "\t") to += 4 - to % 4; else break;
  return to - column;
}

// Without so many columns of white space at most; what is left of a tab that is cut are blanks.
function strip(text, columns) {
  let at = 0, column = 0;
  for (; column < columns && (text[at] === " " || text[at] === "\t"); at++) column += text[at] === "\t" ? 4 - column % 4 : 1;
  return " ".repeat(Math.max(0, column - columns)) + text.slice(at);
}

function closes(line, [opening, marks]) {
  const mark = line.trim();
  return mark.length >= marks.length && mark === marks[0].repeat(mark.length) && indentOf(line) < indentOf(opening) + 4;
}

const isTable = (lines, at) => lines[at].includes("|") && lines[at + 1]?.includes("-") && lines[at + 1].includes("|") && DELIMITERS.test(lines[at + 1].trim());

function table([head, delimiters, ...body]) {
  const sides = cells(delimiters).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : ""));
  const row = (line, kind) => {
    const texts = cells(line);
    return element("tr", {}, ...sides.map((side, at) => element(kind, { className: side }, inline(texts[at] ?? ""))));
  };
  const made = element("table", {}, element("thead", {}, row(head, "th")), element("tbody", {}, ...body.map((line) => row(line, "td"))));
  return element("div", { className: "wide", tabIndex: 0, role: "region", ariaLabel: "table" }, made);
}

const cells = (line) => line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));

export function copyButton(text) {
  const copy = element("button", { type: "button", textContent: "Copy" });
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text());
      copy.textContent = "Copied";
    } catch {  // over plain http from another machine
      document.addEventListener("copy", (event) => { event.preventDefault(); event.clipboardData.setData("text/plain", text()); }, { once: true });
      copy.textContent = document.execCommand("copy") ? "Copied" : "Select it to copy";
    }
    setTimeout(() => { copy.textContent = "Copy"; }, 1500);
  });
  return copy;
}

function codeBlock(code, language) {
  const inside = element("code", { textContent: code });
  const copy = copyButton(() => inside.textContent);
  copy.ariaLabel = "Copy the code";
  const head = element("div", {}, element("span", { textContent: language || "code" }), copy);
  return element("div", { className: "code" }, head, element("pre", { tabIndex: 0 }, inside));
}

// Marks and brackets are texts among the parts until they find their partners; what stands between them becomes an element.
function inline(text) {
  const parts = [], marks = [], runs = new Map();
  let brackets = [], at = 0;
  for (const { 0: { length }, index } of [...text.matchAll(/`+/g)].reverse()) runs.has(length) ? runs.get(length).push(index) : runs.set(length, [index]);
  for (let found; (TOKEN.lastIndex = at, found = TOKEN.exec(text));) {
    parts.push(text.slice(at, found.index));
    at = TOKEN.lastIndex;
    const [said, escaped, ticks, asIs, signs, note, opening, closing, end, angled, bare, name, number] = found;
    if (ticks) {
      const ends = runs.get(ticks.length) ?? [];
      while (ends.at(-1) < at) ends.pop();
      if (!ends.length) { parts.push(said); continue; }
      const code = text.slice(at, ends.at(-1)).replaceAll("\n", " ");
      parts.push(element("code", { textContent: /^ .*[^ ].* $/.test(code) ? code.slice(1, -1) : code }));
      at = ends.at(-1) + ticks.length;
    } else if (signs) {
      const isMark = signs[0] === "~" ? signs.length === 2 : signs.length <= MAX_MARKS && !STARS.test((text[found.index - 1] ?? " ") + text.slice(found.index, at + 2));
      if (isMark) marks.push({ at: parts.length, sign: signs[0], n: signs.length, length: signs.length, ...sides(text, found.index, at) });
      parts.push(signs);
    } else if (notes.has(note)) parts.push(element("sup", { textContent: note }));
    else if (opening || note) {
      brackets.push({ at: parts.length, n: marks.length });
      parts.push(opening ?? "[");
      at = found.index + parts.at(-1).length;
    } else if (closing) {
      const bracket = brackets.pop();
      TARGET.lastIndex = at;
      const [all, angles, address = angles, quoted, title = quoted] = (bracket && TARGET.exec(text)) ?? [];
      if (!/^(?:https?:\/\/|mailto:)/i.test(address)) { parts.push(said); continue; }
      pair(marks.splice(bracket.n), parts);
      const link = fill(anchor(address, title), parts.splice(bracket.at + 1));
      for (const inner of link.querySelectorAll("a")) inner.replaceWith(...inner.childNodes);
      if (!link.textContent) link.textContent = address;
      if (parts[bracket.at] === "[") brackets = [];
      parts[bracket.at] = parts[bracket.at].slice(0, -1);  // the mark of a picture stays
      parts.push(link);
      at += all.length;
    } else if (bare) {
      const address = bare.replace(/[.,:;!?'"*_~}]+$/, "");
      parts.push(anchor(address, "", address));
      at -= bare.length - address.length;
    } else if (angled) parts.push(anchor(angled, "", angled.replace(/^mailto:/, "")));
    else if (end) parts.push(element("br"));
    else if (asIs) asIs.split("\n").forEach((line, n) => parts.push(n ? element("br") : "", line));
    else parts.push(escaped ?? NAMED[name] ?? (number ? String.fromCodePoint(`0${number}`) : said));
  }
  parts.push(text.slice(at));
  pair(marks, parts);
  return fill(document.createDocumentFragment(), parts);
}

// Texts that stand side by side become one: a node for each would be slow.
function fill(parent, parts) {
  let text = "";
  for (const part of parts.filter((one) => one !== null)) {
    if (typeof part === "string") text += part;
    else { if (text) parent.append(text); parent.append(part); text = ""; }
  }
  if (text) parent.append(text);
  return parent;
}

const anchor = (href, title = "", textContent = "") => element("a", { href, title, textContent, target: "_blank", rel: "noopener noreferrer nofollow" });

// Whether marks may open and close what stands beside them.
function sides(text, from, to) {
  const kind = (letter) => (!letter || /\s/.test(letter) ? " " : UNSPACED.test(letter) ? "" : /[\p{P}\p{S}]/u.test(letter) ? "." : "a");
  const before = kind([...text.slice(Math.max(0, from - 2), from)].at(-1)), after = kind([...text.slice(to, to + 2)][0]);
  const opens = after !== " " && (after !== "." || before !== "a"), closes = before !== " " && (before !== "." || after !== "a");
  if (text[from] === "_") return { opens: opens && (!closes || before === "."), closes: closes && (!opens || after === ".") };
  return { opens: opens && !(to - from === 1 && before === "." && after === "."), closes };
}

function pair(marks, parts) {
  const open = [], searched = {};
  for (const closer of marks) {
    const kind = `${closer.sign}${closer.opens}${closer.length % 3}`;
    for (let n = open.length - 1; closer.closes && closer.n && n >= 0 && open[n].at >= (searched[kind] ?? 0); n--) {
      const opener = open[n];
      if (opener.sign !== closer.sign || ((opener.closes || closer.opens) && (opener.length + closer.length) % 3 === 0 && closer.length % 3)) continue;
      const used = Math.min(2, opener.n, closer.n), inside = parts.slice(opener.at + 1, closer.at);
      parts.fill(null, opener.at + 1, closer.at);
      parts[opener.at + 1] = fill(element(closer.sign === "~" ? "s" : used === 2 ? "strong" : "em"), inside);
      for (const one of [opener, closer]) parts[one.at] = one.sign.repeat(one.n -= used);
      open.length = opener.n ? ++n : n;
    }
    if (closer.closes && closer.n) searched[kind] = closer.at;
    if (closer.opens && closer.n) open.push(closer);
    if (open.length > MAX_OPEN_MARKS) open.shift();
  }
}
