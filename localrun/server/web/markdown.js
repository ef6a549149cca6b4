// A small part of Markdown as DOM nodes. Text of a model is only ever the text of a node, never HTML, and a link is only
// made of an http or https address; so whatever a model writes, the page has no other elements than those named here.
// Known: headings, paragraphs, lists (one level), quotes, rules, code blocks, code, bold, italic, links. Not known:
// tables, pictures, HTML; they stay text.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const ITEM = /^\s*(?:([-*+])|(\d{1,9})[.)])\s+(.*)$/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^\s*>\s?(.*)$/;
// One of them at a time, leftmost first.
const INLINE = /(`+)(.+?)\1(?!`)|\*\*(?=\S)(.+?)\*\*|__(?=\S)(.+?)__|\*(?=\S)([^*\n]+?)\*|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)|(https?:\/\/[^\s<>()]+[^\s<>().,:;!?'"])/;

export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

export function markdown(text) {
  const made = document.createDocumentFragment();
  const lines = text.split("\n");
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
      made.append(element(`h${Math.min(marks.length, 4)}`, {}, ...inline(title)));
      at++;
    } else if (ITEM.test(line)) {
      const [, bullet, number] = ITEM.exec(line);
      const list = element(bullet ? "ul" : "ol", bullet ? {} : { start: Number(number) });
      for (let item; at < lines.length && (item = ITEM.exec(lines[at])) && !item[1] === !bullet; ) {
        const said = [item[3]];
        for (at++; at < lines.length && /^\s+\S/.test(lines[at]) && !ITEM.test(lines[at]) && !FENCE.test(lines[at]); at++) said.push(lines[at].trim());
        list.append(element("li", {}, ...inline(said.join("\n"))));
        if (at + 1 < lines.length && !lines[at].trim() && ITEM.test(lines[at + 1])) at++;
      }
      made.append(list);
    } else if (QUOTE.test(line)) {
      const inside = [];
      for (; at < lines.length && QUOTE.test(lines[at]); at++) inside.push(QUOTE.exec(lines[at])[1]);
      made.append(element("blockquote", {}, ...inline(inside.join("\n"))));
    } else {
      const inside = [];
      do inside.push(lines[at++]);
      while (at < lines.length && lines[at].trim() && ![FENCE, RULE, HEADING, ITEM, QUOTE].some((known) => known.test(lines[at])));
      made.append(element("p", {}, ...inline(inside.join("\n"))));
    }
  }
  return made;
}

function closes(line, opening) {
  const mark = line.trim();
  return mark.length >= opening.length && mark === opening[0].repeat(mark.length);
}

function codeBlock(code, language) {
  const copy = element("button", { type: "button", textContent: "Copy" });
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(code);
      copy.textContent = "Copied";
    } catch {
      copy.textContent = "Select it to copy";
    }
    setTimeout(() => { copy.textContent = "Copy"; }, 1500);
  });
  const head = element("div", {}, element("span", { textContent: language || "code" }), copy);
  return element("div", { className: "code" }, head, element("pre", {}, element("code", { textContent: code })));
}

function inline(text, depth = 0) {
  const made = [];
  let rest = text;
  for (let found; depth < 4 && (found = INLINE.exec(rest)); rest = rest.slice(found.index + found[0].length)) {
    made.push(...plain(rest.slice(0, found.index)));
    const [, ticks, code, strong, strongToo, emphasis, label, address, bare] = found;
    if (ticks) made.push(element("code", { textContent: code.trim() || code }));
    else if (strong ?? strongToo) made.push(element("strong", {}, ...inline(strong ?? strongToo, depth + 1)));
    else if (emphasis) made.push(element("em", {}, ...inline(emphasis, depth + 1)));
    else made.push(element("a", { href: address ?? bare, target: "_blank", rel: "noopener noreferrer nofollow", textContent: label ?? bare }));
  }
  return [...made, ...plain(rest)];
}

function plain(text) {
  return text.split("\n").flatMap((line, index) => (index ? [element("br"), line] : [line])).filter((part) => part !== "");
}
