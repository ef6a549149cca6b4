// A part of Markdown as DOM nodes. Text of a model is only ever the text of a node, never HTML, and a link is only made
// of an http or https address; so whatever a model writes, the page has no other elements than those named here.
// Known: headings, paragraphs, lists, tables, quotes, rules, code blocks, code, bold, italic, struck out, links. Not
// known: pictures and HTML; they stay text.

const FENCE = /^ {0,3}(`{3,}(?=[^`]*$)|~{3,})\s*([\w+#.-]*)/;
const ITEM = /^([ \t]*)(?:([-*+])|(\d{1,9})[.)])(?: +|$)(.*)$/;
const HEADING = /^(#{1,6})[ \t]+(\S.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^\s*>\s?(.*)$/;
const DELIMITERS = /^\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?$/;
const MAX_DEPTH = 6;
// One of them at a time, leftmost first. Lengths are bounded, for a model may repeat a mark without end.
const INLINE = /(?<!`)(`{1,3})(?!`)(.{1,2000}?)(?<!`)\1(?!`)|\*\*(?=\S)(.{1,2000}?)\*\*(?!\*)|(?<!\w)__(?=\S)(.{1,2000}?)__(?!\w)|~~(?=\S)(.{1,2000}?)~~|\*(?=\S)([^*\n]{1,2000}?)\*|\[([^[\]\n]{1,500})\]\((https?:\/\/(?:[^\s()]|\([^\s()]{0,200}\)){1,2000})\)|(https?:\/\/(?:[^\s<>()]|\([^\s<>()]{0,200}\)){0,2000}(?:[^\s<>().,:;!?'"]|\([^\s<>()]{0,200}\)))|\\([*_`~])/;

export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

// Nodes that are what they were stay, with what is selected in them and the focus.
export function show(parent, text) {
  const made = [...markdown(text).childNodes];
  made.forEach((node, at) => {
    const there = parent.childNodes[at];
    if (!there) parent.append(node);
    else if (!there.isEqualNode(node)) there.replaceWith(node);
  });
  while (parent.childNodes.length > made.length) parent.lastChild.remove();
}

export function markdown(text, depth = 0) {
  const made = document.createDocumentFragment();
  const lines = text.split(/\r\n?|[\n\u2028\u2029]/);
  for (let at = 0; at < lines.length;) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    if (fence) {
      const inside = [];
      for (at++; at < lines.length && !closes(lines[at], fence[1]); at++) inside.push(lines[at]);
      at++;
      made.append(codeBlock(inside.join("\n"), fence[2]));
    } else if (!line.trim()) {
      at++;
    } else if (RULE.test(line)) {
      made.append(element("hr"));
      at++;
    } else if (HEADING.test(line)) {
      const [, marks, title] = HEADING.exec(line);
      made.append(element(`h${Math.min(marks.length, 4)}`, {}, ...inline(title.trimEnd().replace(/\s#+$/, ""))));
      at++;
    } else if (isTable(lines, at)) {
      const end = lines.findIndex((row, index) => index > at + 1 && !(row.includes("|") && row.trim()));
      made.append(table(lines.slice(at, end < 0 ? lines.length : end)));
      at = end < 0 ? lines.length : end;
    } else if (ITEM.test(line) && depth < MAX_DEPTH) {
      const [, indent, bullet, number] = ITEM.exec(line);
      const list = element(bullet ? "ul" : "ol", { dir: "auto", ...(bullet ? {} : { start: Number(number) }) });
      for (let item; at < lines.length && (item = ITEM.exec(lines[at])) && item[1].length <= indent.length + 1 && !item[2] === !bullet;) {
        const inside = [item[4]], width = lines[at].length - item[4].length;
        for (at++; at < lines.length && belongs(lines, at, item[1].length); at++) inside.push(lines[at].replace(new RegExp(`^[ \\t]{0,${width}}`), ""));
        while (inside.length > 1 && !inside.at(-1).trim()) inside.pop();
        const content = markdown(inside.join("\n"), depth + 1);
        const first = content.firstElementChild;
        if (first?.tagName === "P") first.replaceWith(...first.childNodes);  // as all other items have it
        list.append(element("li", {}, content));
      }
      made.append(list);
    } else if (QUOTE.test(line) && depth < MAX_DEPTH) {
      const inside = [];
      for (; at < lines.length && QUOTE.test(lines[at]); at++) inside.push(QUOTE.exec(lines[at])[1]);
      made.append(element("blockquote", {}, markdown(inside.join("\n"), depth + 1)));
    } else {
      const inside = [];
      do inside.push(lines[at++].trim());
      while (at < lines.length && lines[at].trim() && !isTable(lines, at) && ![FENCE, RULE, HEADING, ITEM, QUOTE].some((known) => known.test(lines[at])));
      made.append(element("p", {}, ...inline(inside.join("\n"))));
    }
  }
  return made;
}

// Whether a line is a part of the item above, whose mark is indented by so much; an empty line is if the next one is.
function belongs(lines, at, indent) {
  if (!lines[at].trim()) {
    const next = lines.slice(at + 1, at + 3).find((line) => line.trim());
    return next !== undefined && (/^ {2}/.test(next.slice(indent)) && !next.slice(0, indent).trim() || ITEM.exec(next)?.[1].length === indent);
  }
  const deep = lines[at].search(/\S/);
  if (deep >= indent + (lines[at][deep - 1] === "\t" ? 1 : 2)) return true;
  return !lines[at - 1].trim() ? false : ![FENCE, RULE, HEADING, ITEM, QUOTE].some((known) => known.test(lines[at]));
}

const isTable = (lines, at) => lines[at].includes("|") && lines[at + 1]?.includes("-") && lines[at + 1].includes("|") && DELIMITERS.test(lines[at + 1].trim());

function table([head, delimiters, ...body]) {
  const sides = cells(delimiters).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : ""));
  const row = (line, kind) => {
    const texts = cells(line);
    return element("tr", {}, ...sides.map((side, at) => element(kind, { className: side }, ...inline(texts[at] ?? ""))));
  };
  const made = element("table", {}, element("thead", {}, row(head, "th")), element("tbody", {}, ...body.map((line) => row(line, "td"))));
  return element("div", { className: "wide", tabIndex: 0, role: "region", ariaLabel: "table" }, made);
}

const cells = (line) => line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));

function closes(line, opening) {
  const mark = line.trim();
  return mark.length >= opening.length && mark === opening[0].repeat(mark.length);
}

export function copyButton(text) {
  const copy = element("button", { type: "button", textContent: "Copy" });
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text());
      copy.textContent = "Copied";
    } catch {
      copy.textContent = "Select it to copy";
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

function inline(text, depth = 0) {
  const made = [];
  let rest = text;
  for (let found; depth < 4 && (found = INLINE.exec(rest)); rest = rest.slice(found.index + found[0].length)) {
    made.push(...plain(rest.slice(0, found.index)));
    const [, ticks, code, strong, strongToo, struck, emphasis, label, address, bare, escaped] = found;
    if (escaped) made.push(escaped);
    else if (ticks) made.push(element("code", { textContent: code.trim() || code }));
    else if (strong ?? strongToo) made.push(element("strong", {}, ...inline(strong ?? strongToo, depth + 1)));
    else if (struck) made.push(element("s", {}, ...inline(struck, depth + 1)));
    else if (emphasis) made.push(element("em", {}, ...inline(emphasis, depth + 1)));
    else made.push(element("a", { href: address ?? bare, target: "_blank", rel: "noopener noreferrer nofollow", textContent: label ?? bare }));
  }
  return [...made, ...plain(rest)];
}

function plain(text) {
  return text.split("\n").flatMap((line, index) => (index ? [element("br"), line] : [line])).filter((part) => part !== "");
}
