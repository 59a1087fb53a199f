// Results, findings, and how the run was started.

class Overview {
  constructor(data, openStep) {
    Object.assign(this, { data, openStep });
    this.element = h("section", {});
  }

  show() {
    if (this.element.childElementCount) return;
    for (const run of this.data.runs) this.element.append(...this.parts(run));
  }

  parts(run) {
    const { summary, about } = run;
    const at = (name) => { const values = run.metrics[name]; return values ? [...values].filter((value) => !Number.isNaN(value)) : []; };
    const facts = [];
    const fact = (label, value) => { if (value !== undefined && value !== null) facts.push(h("div", { className: "fact" }, h("b", {}, value), label)); };
    const name = run.held_out.metric;
    if (name) {
      const [values, low, high] = [at(name), at(`${name}_low`), at(`${name}_high`)];
      fact(`held-out ${heldOutLabel(run)}${low.length ? `, ${digits(low.at(-1), 3)} to ${digits(high.at(-1), 3)}` : ""}`, values.length > 1 ? `${digits(values[0], 3)} → ${digits(values.at(-1), 3)}` : digits(values[0], 3));
    }
    const rewards = at("reward/mean");
    if (rewards.length) fact("mean reward, first and last round", `${digits(rewards[0], 3)} → ${digits(rewards.at(-1), 3)}`);
    if (run.steps.length) fact("optimizer steps", digits(run.steps[run.steps.length - 1]));
    const taken = summary.seconds ?? at("time/step_s").reduce((sum, value) => sum + value, 0);
    if (taken) fact(summary.seconds === undefined ? "in steps so far" : "in all", seconds(taken));
    if (at("memory/peak_gib").length) fact("peak memory", `${digits(at("memory/peak_gib").reduce((most, value) => Math.max(most, value)), 3)} GiB`);
    fact("rollouts", digits(run.rollouts.step.length + run.dropped));
    const settings = about.config.map(({ key, value, overridden, changed }) => h("tr", { className: `${overridden ? "set " : ""}${changed ? "changed" : ""}` }, h("td", {}, key), h("td", {}, value)));
    const hide = h("input", { type: "checkbox", checked: true, onchange: () => settings.forEach((row) => { row.hidden = hide.checked && !row.className.trim(); }) });
    hide.onchange();
    const versions = Object.entries(about.versions).map(([package_, version]) => h("tr", {}, h("td", {}, package_), h("td", {}, String(version))));
    return [
      h("h2", {}, run.name), h("div", { className: "facts" }, facts),
      h("h2", {}, "Findings"), ...this.findings(run),
      h("h2", {}, "Command"), h("pre", { id: "command" }, about.command || "(the folder has no record of it)"),
      ...(about.plan ? [h("h2", {}, "Devices"), h("pre", { id: "plan" }, about.plan)] : []),
      h("h2", {}, "Configuration"),
      h("p", { className: "note" }, h("label", {}, hide, " only what differs from the defaults (blue) or was set by the command (bold)"), " Keys that may have secrets, and paths, are left out."),
      h("table", { id: "config" }, settings),
      ...(versions.length ? [h("h2", {}, "Versions"), h("p", { className: "note" }, [about.machine, about.started && `started ${about.started}`].filter(Boolean).join("; ")), h("table", { id: "versions" }, versions)] : []),
      h("p", { className: "note" }, `Written by torchrl-grpo ${this.data.version}.`),
    ];
  }

  findings(run) {
    // Curves of several runs have the findings of all.
    const before = this.data.runs.slice(0, this.data.runs.indexOf(run)).reduce((sum, each) => sum + each.findings.length, 0);
    const notes = run.notes.map((note) => h("p", { className: "note" }, `Note: ${note}.`));
    if (!run.findings.length) return [h("p", { className: "good" }, "No rule found anything wrong."), ...notes];
    return notes.concat(run.findings.map((finding, number) => h("div", { className: `finding ${finding.holds ? "" : "over"}` },
      h("b", {}, `${before + number + 1}. ${finding.seen}`), ` (${finding.holds ? "" : "over; "}since step ${finding.since}) `,
      h("button", { onclick: () => this.openStep(finding.since, run) }, "rollouts of that step"),
      h("div", {}, finding.advice), h("div", { className: "note" }, `Threshold: ${finding.source}.`))));
  }
}
