// What differs between runs: configuration, versions, and results on the same held-out problems.

class Differences {
  constructor(data) {
    Object.assign(this, { data, histories: [], names: data.runs.map((run) => run.name) });
    this.element = h("section", {});
  }

  show() {
    if (!this.element.childElementCount) this.element.append(...this.settings(), ...this.surroundings(), ...this.data.differences.comparisons.flatMap((each) => this.comparison(each)));
    for (const history of this.histories) history.list.draw();
  }

  table(id, heads, rows) {
    return h("table", { id }, h("tr", {}, heads.map((head) => h("th", {}, head))), rows.map((cells) => h("tr", {}, cells)));
  }

  settings() {
    const { rows, hidden, unrecorded } = this.data.differences.settings;
    const cell = (each) => (each ? h("td", { className: `cell ${each.overridden ? "set" : ""} ${each.changed ? "changed" : ""}` }, each.value) : h("td", {}, "–"));
    const notes = [];
    if (unrecorded.length) notes.push(`No record of the configuration: ${unrecorded.join(", ")}.`);
    if (hidden.length) notes.push(`These differ too, and their values may be secrets or paths: ${hidden.join(", ")}.`);
    if (!rows.length && !hidden.length && !unrecorded.length) notes.push("The configurations are equal.");
    return [h("h2", {}, "Configuration"),
      ...(rows.length ? [h("p", { className: "note" }, "Keys that differ. Bold was set by the command, and blue is not the default."), this.table("settings", ["key", ...this.names], rows.map(({ key, cells }) => [h("td", {}, key), ...cells.map(cell)]))] : []),
      ...notes.map((note) => h("p", { className: "note" }, note))];
  }

  surroundings() {
    const rows = this.data.differences.surroundings;
    if (!rows.length) return [];
    return [h("h2", {}, "Versions and machine"), this.table("surroundings", ["", ...this.names], rows.map(({ key, cells }) => [h("td", { style: { whiteSpace: "nowrap" } }, key), ...cells.map((text) => h("td", { className: "cell" }, text.includes("\n") ? h("pre", {}, text) : text || "–"))]))];
  }

  comparison({ run, kind, notes, moments }) {
    const [first, second] = [this.names[0], this.names[run]];
    return [h("h2", {}, `Held-out problems: ${second} minus ${first}`), ...notes.map((note) => h("p", { className: "note limits" }, note)),
      ...(moments.length ? [h("p", { className: "note" }, "Means over the same problems, and the difference with its paired 95 % interval over problems. Other seeds of the same settings differ too.")] : []),
      ...moments.flatMap((moment) => this.moment(moment, first, second, kind === "loss"))];
  }

  moment({ steps: [before, after], metrics, problems }, first, second, isLoss) {
    const title = before === after ? `Step ${before}, in both` : `The last of each: step ${before} of ${first}, step ${after} of ${second}`;
    const sign = (value) => `${value > 0 ? "+" : ""}${digits(value, 3)}`;
    const rows = metrics.map(({ name, first: base, second: other, difference, low, high, problems: count }) => {
      const interval = low === null ? "" : `${sign(low)} to ${sign(high)}`;
      return [name, digits(base, 3), digits(other, 3), sign(difference), interval, digits(count)].map((text, at) => h(at === 3 ? "th" : "td", {}, text));
    });
    const grade = isLoss ? "loss" : "grade";
    const history = new History("", `Problems whose ${grade} differs: that in ${first}, then that in ${second}; a click shows both responses.`, problems.map((problem) => this.problem(problem, first, second, [before, after], grade)), null, isLoss ? (loss) => Math.exp(-loss) : undefined);
    if (problems.length) this.histories.push(history);
    return [h("h3", {}, title), this.table("", ["", first, second, "difference", "95 % interval", "problems"], rows), ...(problems.length ? [history.element] : [])];
  }

  problem({ id, state, grades, samples, texts }, first, second, steps, grade) {
    const title = (name, at) => `${name}, step ${steps[at]}, ${grade} ${digits(grades[at])}${samples[at] > 1 ? `, the first of ${samples[at]} responses` : ""}`;
    const text = texts[0] ?? texts[1];
    return {
      state, grades, steps, label: text ? `${id}: ${question(text.prompt)}` : id,
      open: () => [h("h3", {}, id), ...(text ? [h("pre", {}, text.prompt)] : []), h("div", { className: "cards" }, [first, second].map((name, at) => answer(title(name, at), texts[at]?.response ?? "(the text is not in this report)")))],
    };
  }
}
