// The browser of rollouts: a filtered list of all, and the group of the chosen one side by side.

const FINISH = ["–", "ended", "cut off", "failed"];

class Rollouts {
  constructor(run, onChange) {
    Object.assign(this, { run, onChange, columns: run.rollouts, order: "row", falls: false, filters: {}, chosen: -1 });
    this.total = this.columns.step.length;
    this.parts = Object.keys(this.columns).filter((name) => name.startsWith("part:"));
    this.shown = this.parts.filter((name) => !name.slice(5).includes("/")).slice(0, 4);
    this.matches = new Int32Array(0);
    this.list = new VirtualList((at) => this.row(this.matches[at]));
    this.count = h("p", { className: "note", id: "count" });
    this.group = h("div", { id: "group" });
    this.element = h("section", {});
  }

  show(filters) {
    if (!this.element.childElementCount) this.build();
    if (filters) this.setFilters(filters);
    this.list.draw();
  }

  build() {
    const field = (name, label, options = {}) => h("label", {}, `${label} `, h("input", { id: `filter-${name}`, type: "number", step: "any", ...options, oninput: () => this.fromInputs() }));
    const select = (name, label, choices) => h("label", {}, `${label} `, h("select", { id: `filter-${name}`, onchange: () => this.fromInputs() }, choices.map(([value, text]) => h("option", { value }, text))));
    const numbers = [["reward", "reward"], ["advantage", "advantage"], ...this.parts.map((name) => [name, name.slice(5)])];
    this.inputs = h("div", { className: "filters" },
      field("from", "step from"), field("to", "to"), field("group", "group"),
      select("of", "value of", numbers), field("least", "from"), field("most", "to"),
      field("shortest", "tokens from"), field("longest", "to"),
      select("finish", "finish", [["", "any"], ["1", "ended"], ["2", "cut off"], ["3", "failed"]]),
      select("kept", "groups", [["", "all"], ["kept", "trained on"], ["signal", "trained on, rewards differ"], ["discarded", "discarded"], ...this.run.reasons.slice(1).map((reason, at) => [`reason:${at + 1}`, `discarded: ${reason}`])]),
      field("problem", "problem"),
      h("label", {}, "text ", h("input", { id: "filter-text", type: "search", oninput: () => this.fromInputs() })),
      h("button", { id: "clear", onclick: () => this.setFilters({}) }, "Clear"));
    const head = ([name, text, className = ""]) => h("span", { className, title: `sort by ${text}`, onclick: () => this.sortBy(name) }, text);
    const heads = [["row", "step"], ["group", "group"], ["reward", "reward"], ...this.shown.map((name) => [name, name.slice(5)]), ["advantage", "advantage"], ["length", "tokens"], ["finish", "finish"]];
    const notes = [];
    if (this.run.dropped) notes.push(`The oldest ${digits(this.run.dropped)} rollouts are not in this report.`);
    if (this.run.sampled) notes.push("Texts are a sample, with the first and the newest rounds; numbers are of all rollouts.");
    for (const [name, lines] of Object.entries(this.run.damaged)) notes.push(`${name}: ${digits(lines)} damaged lines were skipped.`);
    this.element.append(this.inputs, h("div", { className: "heads" }, heads.map(head), h("span", { className: "wide" }, "response")), this.list.element, this.count, h("p", { className: "note" }, notes.join(" ")), this.group);
    this.setFilters({});
  }

  setFilters(filters) {
    for (const input of this.inputs.querySelectorAll("input, select")) input.value = filters[input.id.slice(7)] ?? (input.id === "filter-of" ? "reward" : "");
    // A choice that this report does not have, as of a link to another one.
    const of = this.inputs.querySelector("#filter-of");
    of.value ||= "reward";
    this.fromInputs();
    if (this.matches.length && filters.from !== undefined) this.choose(this.matches[0]);
  }

  fromInputs() {
    this.filters = Object.fromEntries([...this.inputs.querySelectorAll("input, select")].map((input) => [input.id.slice(7), input.value]));
    this.apply();
    this.onChange({ ...this.filters, of: this.filters.least || this.filters.most ? this.filters.of : "" });
  }

  apply() {
    const { columns, filters, total } = this;
    const tests = [];
    const bound = (column, low, high) => {
      const least = low === "" ? -Infinity : Number(low), most = high === "" ? Infinity : Number(high);
      // Values are float32, bounds float64.
      if (low !== "" || high !== "") tests.push((row) => columns[column][row] >= Math.fround(least) && columns[column][row] <= Math.fround(most));
    };
    bound("step", filters.from, filters.to);
    bound("group", filters.group, filters.group);
    bound("problem", filters.problem, filters.problem);
    bound(filters.of, filters.least, filters.most);
    bound("length", filters.shortest, filters.longest);
    bound("finish", filters.finish, filters.finish);
    if (filters.kept === "kept" || filters.kept === "signal") tests.push((row) => columns.discarded[row] === 0);
    if (filters.kept === "signal") tests.push((row) => columns.advantage[row] !== 0);
    if (filters.kept === "discarded") tests.push((row) => columns.discarded[row] !== 0);
    if (filters.kept.startsWith("reason:")) { const reason = Number(filters.kept.slice(7)); tests.push((row) => columns.discarded[row] === reason); }
    if (filters.text) { const hits = this.textHits(filters.text.toLowerCase()); tests.push((row) => columns.text[row] >= 0 && hits[columns.text[row]] === 1); }
    const matches = new Int32Array(total);
    let count = 0;
    rows: for (let row = 0; row < total; row++) {
      for (const test of tests) if (!test(row)) continue rows;
      matches[count++] = row;
    }
    this.matches = matches.subarray(0, count);
    this.sort();
    this.count.textContent = `${digits(count)} of ${digits(total)} rollouts`;
    this.list.show(count);
  }

  textHits(query) {
    const { rollouts, prompts } = this.run.texts;
    this.lower ??= rollouts.map((entry) => [prompts[entry.prompt], entry.response, ...(entry.messages || []).map((message) => message.content), ...Object.values(entry.errors || {}), ...Object.values(entry.verdicts || {})].join("\n").toLowerCase());
    return Uint8Array.from(this.lower, (text) => (text.includes(query) ? 1 : 0));
  }

  sortBy(name) {
    this.falls = this.order === name ? !this.falls : name !== "row";
    this.order = name;
    this.apply();
  }

  sort() {
    if (this.order !== "row") {
      const values = this.columns[this.order];
      this.matches.sort((a, b) => values[a] - values[b] || a - b);
    }
    if (this.falls) this.matches.reverse();
  }

  textOf(row) {
    return this.run.texts.rollouts[this.columns.text[row]];
  }

  row(row) {
    const { columns } = this;
    const cell = (text, className = "") => h("span", { className, title: className ? "" : text }, text);
    const discarded = columns.discarded[row];
    return h("div", { className: `row${row === this.chosen ? " on" : ""}`, onclick: () => this.choose(row) },
      cell(String(columns.step[row])), cell(String(columns.group[row])), cell(digits(columns.reward[row])),
      this.shown.map((name) => cell(digits(columns[name][row]))),
      cell(discarded ? "discarded" : digits(columns.advantage[row])), cell(columns.length[row] < 0 ? "–" : String(columns.length[row])), cell(FINISH[columns.finish[row]]),
      cell((this.textOf(row)?.response ?? "(text not in the sample)").slice(0, 240), "wide"));
  }

  choose(row) {
    this.chosen = row;
    this.list.draw();
    const { columns, run } = this;
    const rows = [];
    for (let other = 0; other < this.total; other++) {
      if (columns.step[other] === columns.step[row] && columns.group[other] === columns.group[row]) rows.push(other);
    }
    const text = this.textOf(row);
    const reason = run.reasons[columns.discarded[row]];
    const equal = rows.every((other) => columns.reward[other] === columns.reward[row]);
    const first = h("p", { className: "note" }, `Step ${columns.step[row]}, group ${columns.group[row]}, problem ${columns.problem[row]}, ${rows.length} responses. `,
      reason ? h("b", { className: "bad" }, `Discarded: ${reason}. `) : equal ? h("b", {}, "All rewards are equal, so they taught nothing. ") : null,
      h("button", { onclick: () => this.setFilters({ problem: String(columns.problem[row]) }) }, "All rollouts of this problem"));
    const hasTeacher = rows.some((other) => this.textOf(other)?.tokens?.teacher);
    const tint = h("select", { id: "tint" }, TINTS.filter(([value]) => value !== "teacher" || hasTeacher).map(([value, label]) => h("option", { value, selected: value === this.tint }, label)));
    tint.onchange = () => { this.tint = tint.value; this.choose(row); };
    const hasTokens = rows.some((other) => this.textOf(other)?.tokens);
    this.group.replaceChildren(h("h2", {}, "Group"), first, hasTokens ? h("p", {}, "Color tokens by ", tint) : "",
      h("h3", {}, "Prompt"), h("pre", { className: "prompt" }, text ? run.texts.prompts[text.prompt] : "(not in the sample)"),
      ...pictures(run, text?.pictures),
      h("div", { className: "cards" }, rows.map((other) => this.card(other, other === row))));
  }

  card(row, isChosen) {
    const { columns } = this;
    const text = this.textOf(row);
    const parts = this.parts.filter((name) => !Number.isNaN(columns[name][row])).map((name) => `${name.slice(5)} ${digits(columns[name][row])}`);
    const body = [];
    if (!text) body.push(h("p", { className: "note" }, "(text not in the sample)"));
    if (text?.messages) body.push(...text.messages.map((message) => h("div", { className: `turn ${message.role === "assistant" ? "assistant" : ""}` }, h("b", {}, message.role), h("div", { className: "text" }, message.content))));
    // They are all of the turns, with those of tools and of the template.
    if (text?.tokens) body.push(...(text.messages ? [h("b", {}, "tokens")] : []), tokenText(text.tokens, columns.advantage[row], this.tint || "engine"));
    else if (text && !text.messages) body.push(h("div", { className: "text response", dir: "auto" }, text.response));
    for (const [name, error] of Object.entries(text?.errors || {})) body.push(h("p", { className: "bad" }, `${name}: ${error}`));
    for (const [name, verdict] of Object.entries(text?.verdicts || {})) body.push(h("p", { className: "verdict" }, `${name}: ${verdict}`));
    return h("div", { className: `card${isChosen ? " on" : ""}` },
      h("h3", {}, `reward ${digits(columns.reward[row])}, advantage ${digits(columns.advantage[row])}`),
      h("p", { className: "note" }, [parts.join(", "), columns.length[row] < 0 ? "" : `${columns.length[row]} tokens`, FINISH[columns.finish[row]], columns.version[row] < 0 ? "" : `weights of step ${columns.version[row]}`].filter((each) => each && each !== "–").join("; ")),
      body);
  }
}

// How a token is colored: by a number of it that is bad at one end of a scale, or good and bad at its two ends.
const TINTS = [["engine", "log-probability"], ["difference", "trainer minus engine"], ["push", "advantage times ratio"], ["teacher", "teacher minus trainer"]];

function tokenText(tokens, advantage, tint) {
  const { text, engine, trainer, teacher } = tokens;
  const shade = (value, scale) => `rgba(${value < 0 ? "179,38,30" : "26,127,75"},${Math.min(0.75, Math.abs(value) / scale)})`;
  return h("div", { className: "text tokens" }, text.map((piece, at) => {
    if (engine[at] === null) return h("span", { title: "not sampled" }, piece);
    const difference = trainer[at] - engine[at];
    const ratio = Math.exp(difference);
    const [value, scale] = { engine: [engine[at], 5], difference: [difference, 0.5], push: [advantage * ratio, 2], teacher: [teacher ? teacher[at] - trainer[at] : 0, 2] }[tint];
    const title = `log-probability: engine ${digits(engine[at])}, trainer ${digits(trainer[at])}${teacher ? `, teacher ${digits(teacher[at])}` : ""}; ratio ${digits(ratio)}`;
    return h("span", { title, style: { background: shade(value, scale) } }, piece);
  }));
}
