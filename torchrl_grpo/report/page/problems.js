// The history of each problem: which were learned, which forgotten, and what the model wrote before and after.

const STATES = ["learned", "forgotten", "never solved", "always solved", "changing", "seen once"];

// What became of a problem, from its grades in order: solved before, solved after, solved in between.
function stateOf(grades, threshold) {
  const solved = grades.map((grade) => grade >= threshold);
  if (solved.length < 2) return "seen once";
  if (solved.every(Boolean)) return "always solved";
  if (!solved.some(Boolean)) return "never solved";
  if (!solved[0] && solved[solved.length - 1]) return "learned";
  return solved[solved.length - 1] ? "changing" : "forgotten";
}

const answer = (title, response) => h("div", { className: "card" }, h("h3", {}, title), h("div", { className: "text response", dir: "auto" }, response));

class History {
  // A problem has `label`, `grades` in order, `steps` of these, and `open()`, which shows its responses. Without
  // a threshold, no grade is a solution. A problem may have a `state`. `shadeOf` makes a shade of 0 to 1 of a grade.
  constructor(title, note, problems, threshold, shadeOf = (grade) => grade) {
    this.problems = problems;
    for (const problem of problems) problem.state ??= threshold === null ? "" : stateOf(problem.grades, threshold);
    this.shadeOf = shadeOf;
    this.matches = problems;
    this.marks = Math.min(40, problems.reduce((most, problem) => Math.max(most, problem.grades.length), 3));
    this.list = new VirtualList((at) => this.row(this.matches[at]));
    this.list.element.style.height = `min(46vh, ${ROW * problems.length + 4}px)`;
    this.detail = h("div", { className: "detail" });
    const states = [...new Set([...STATES, ...problems.map((problem) => problem.state)])].filter(Boolean);
    this.width = `${Math.max(110, 7.5 * problems.reduce((most, problem) => Math.max(most, problem.state.length), 0))}px`;
    const counts = states.map((state) => [state, problems.filter((problem) => problem.state === state).length]).filter(([, count]) => count);
    const buttons = [["all", problems.length], ...counts].map(([state, count]) => h("button", { dataset: { state }, onclick: () => this.filter(state) }, `${state}: ${digits(count)}`));
    this.buttons = buttons;
    this.element = h("section", { className: "history" }, h("h2", {}, title), h("p", { className: "note" }, note), h("div", { className: "filters" }, buttons), this.list.element, this.detail);
    this.filter("all");
  }

  filter(state) {
    this.matches = state === "all" ? this.problems : this.problems.filter((problem) => problem.state === state);
    for (const button of this.buttons) button.classList.toggle("on", button.dataset.state === state);
    this.list.show(this.matches.length);
  }

  row(problem) {
    // At most 40 marks, evenly taken, the last included.
    const every = Math.max(1, Math.ceil(problem.grades.length / 40));
    const marks = problem.grades.map((grade, at) => [grade, problem.steps[at]]).filter((_, at) => (problem.grades.length - 1 - at) % every === 0);
    const color = (grade) => `rgba(26,127,75,${Math.max(0.06, Math.min(1, this.shadeOf(grade)))})`;
    return h("div", { className: "row", onclick: () => this.detail.replaceChildren(...problem.open()) },
      h("span", { style: { width: this.width } }, problem.state), h("span", { style: { width: "130px" } }, `${digits(problem.grades[0], 2)} → ${digits(problem.grades.at(-1), 2)}`),
      h("span", { className: "marks", style: { width: `${12 * this.marks}px` } }, marks.map(([grade, step]) => h("i", { title: `step ${step}: ${digits(grade)}`, style: { background: color(grade) } }))),
      h("span", { className: "wide" }, problem.label));
  }
}

class Problems {
  constructor(run, openRollouts) {
    Object.assign(this, { run, openRollouts });
    this.element = h("section", {});
  }

  show() {
    if (this.element.childElementCount) {
      for (const history of this.histories) history.list.draw();
      return;
    }
    this.histories = [this.heldOut(), this.training()].filter(Boolean);
    if (this.histories.length) this.element.append(...this.histories.map((history) => history.element));
    else this.element.append(h("p", { className: "note" }, "Neither evaluations.jsonl nor rollouts.jsonl has a response."));
  }

  heldOut() {
    const { ids, steps, grades, lost, metric } = this.run.held_out;
    const texts = this.run.texts.held_out;
    if (!ids.length) return null;
    const isLoss = metric === "eval/loss";
    // Only a verdict says whether a problem is solved. Of several responses, at least half have to be right.
    const threshold = isLoss || metric === "eval/primary" ? null : 0.5;
    const moved = (values) => {
      const rise = (isLoss ? -1 : 1) * (values.at(-1) - values[0]);
      return values.length < 2 ? "seen once" : rise > 0 ? "better" : rise < 0 ? "worse" : "unchanged";
    };
    const grade = isLoss ? "loss" : "grade";
    const side = (title, text) => answer(`${title}, step ${text.step}, ${grade} ${digits(text.grade)}`, text.response);
    const problems = ids.map((id, problem) => {
      const history = steps.map((step, at) => [step, grades[at * ids.length + problem]]).filter(([, grade]) => !Number.isNaN(grade));
      const text = texts[problem];
      const state = threshold === null ? moved(history.map(([, grade]) => grade)) : undefined;
      return {
        state,
        label: text ? `${id}: ${question(text.prompt)}` : id, steps: history.map(([step]) => step), grades: history.map(([, grade]) => grade),
        open: () => [h("h3", {}, id), ...(text ? [h("pre", {}, text.prompt), ...pictures(this.run, text.pictures), h("div", { className: "cards" }, side("Before", text.first), side("After", text.last))] : [h("p", { className: "note" }, "The texts of this problem are not in the report.")])],
      };
    }).filter((problem) => problem.grades.length);
    const note = `${isLoss ? "Loss" : "Grade"} of each held-out problem in ${steps.length} evaluations; a click shows the first and the newest response.${lost ? " Problems or texts beyond a bound are left out." : ""}`;
    return new History("Held-out problems", note, problems, threshold, isLoss ? (loss) => Math.exp(-loss) : undefined);
  }

  training() {
    const { columns, prompts } = { columns: this.run.rollouts, prompts: this.run.texts.prompts };
    const { reward, threshold = 1 } = this.run.about.right;
    const values = columns[`part:${reward}`] ?? columns.reward;
    const byProblem = new Map();
    for (let row = 0; row < columns.step.length; row++) {
      let problem = byProblem.get(columns.problem[row]);
      if (!problem) byProblem.set(columns.problem[row], (problem = { steps: [], grades: [], counts: [], text: -1 }));
      if (problem.steps.at(-1) !== columns.step[row]) {
        problem.steps.push(columns.step[row]);
        problem.grades.push(0);
        problem.counts.push(0);
      }
      problem.grades[problem.grades.length - 1] += values[row] >= Math.fround(threshold) ? 1 : 0;
      problem.counts[problem.counts.length - 1] += 1;
      if (columns.text[row] >= 0) problem.text = columns.text[row];
    }
    const problems = [...byProblem].map(([number, { steps, grades, counts, text }]) => ({
      label: text < 0 ? `problem ${number}` : question(prompts[this.run.texts.rollouts[text].prompt]),
      steps, grades: grades.map((right, at) => right / counts[at]),
      open: () => [h("button", { onclick: () => this.openRollouts({ problem: String(number) }) }, "Its rollouts"), h("pre", {}, text < 0 ? "" : prompts[this.run.texts.rollouts[text].prompt]), ...pictures(this.run, this.run.texts.rollouts[text]?.pictures)],
    }));
    if (!problems.length) return null;
    const what = columns[`part:${reward}`] ? `the reward ${reward}` : "the sum of the rewards";
    const note = `Share of right responses to each training problem in the rounds that had it: ${what} is at least ${digits(threshold)}. Solved means at least half.`;
    return new History("Training problems", note, problems, 0.5);
  }
}
