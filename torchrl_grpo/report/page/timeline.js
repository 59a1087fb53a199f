// What happened when: phases of each step by lane, in the order in which a step has them, and idle gaps.

// Metric, lane, name and color. A phase stands in all its lanes.
const PHASES = [
  ["time/wait_s", ["waiting"], "wait for workers", "#b3261e"],
  ["time/generate_s", ["engine"], "generate", "#2563a8"],
  ["time/score_s", ["rewards"], "score", "#8e44ad"],
  ["time/prepare_s", ["trainer"], "prepare", "#0e8a96"],
  ["time/train_s", ["trainer"], "train", "#1a7f4b"],
  ["time/publish_s", ["trainer", "engine"], "publish", "#a07a00"],
  ["time/eval_s", ["engine"], "evaluate", "#d3548f"],
  ["time/other_s", ["other"], "other", "#667080"],
];

class Timeline {
  constructor(run) {
    this.run = run;
    this.element = h("section", {});
  }

  show() {
    if (this.element.childElementCount) return;
    const { steps, metrics } = this.run;
    if (!metrics["time/step_s"]) {
      this.element.append(h("p", { className: "note" }, "metrics.jsonl has no step yet."));
      return;
    }
    const last = steps[steps.length - 1];
    const field = (id, value) => h("input", { id, type: "number", value, oninput: () => this.draw() });
    this.from = field("time-from", Math.max(1, last - 14));
    this.to = field("time-to", last);
    this.tracks = h("div", { id: "tracks" });
    this.element.append(h("p", { className: "note" }, "Phases of the trainer's first process and what it calls, end to end; other ranks train in the same phases. Hatched is idle. Checkpoints are written between steps and are not measured."),
      h("div", { className: "filters" }, h("label", {}, "steps ", this.from), h("label", {}, "to ", this.to)), this.tracks);
    this.draw();
  }

  draw() {
    const { steps, metrics } = this.run;
    const value = (name, at) => { const number = metrics[name]?.[at]; return number > 0 ? number : 0; };
    const lanes = new Map();
    const totals = new Map();
    const put = (lane, start, length, color, title) => {
      if (!lanes.has(lane)) lanes.set(lane, []);
      lanes.get(lane).push({ start, length, color, title });
    };
    const workers = Object.keys(metrics).filter((name) => name.startsWith("workers/tokens_per_s_"));
    let clock = 0;
    for (let at = 0; at < steps.length; at++) {
      if (steps[at] < Number(this.from.value) || steps[at] > Number(this.to.value)) continue;
      const begin = clock;
      for (const [name, owners, label, color] of PHASES) {
        const length = value(name, at);
        if (!length) continue;
        for (const owner of owners) put(owner, clock, length, color, `step ${steps[at]}: ${label} ${seconds(length)}`);
        totals.set(label, (totals.get(label) || 0) + length);
        clock += length;
      }
      clock = Math.max(clock, begin + value("time/step_s", at));
      for (const name of workers.slice(0, 64)) {
        const share = value(name, at) ? value("workers/busy_share", at) : 0;
        const worker = name.split("_").at(-1);
        if (share) put(`worker ${worker}`, begin, (clock - begin) * share, "#2563a8", `step ${steps[at]}: worker ${worker}, ${digits(value(name, at))} tokens/s; workers were busy ${digits(share * 100, 3)} % of the time`);
      }
    }
    const position = (part) => `${(100 * part) / (clock || 1)}%`;
    const rows = [...lanes].map(([lane, blocks]) => {
      const busy = blocks.reduce((sum, block) => sum + block.length, 0);
      return h("div", { className: "lane", dataset: { lane } }, h("b", {}, `${lane} ${digits((100 * busy) / (clock || 1), 2)} %`),
        h("div", { className: "track" }, blocks.slice(0, 4000).map((block) => h("i", { title: block.title, style: { left: position(block.start), width: position(block.length), background: block.color } }))));
    });
    const key = PHASES.filter(([, , label]) => totals.has(label)).map(([, , label, color]) => [h("i", { className: "key", style: { background: color } }), `${label} ${seconds(totals.get(label))}`]);
    this.tracks.replaceChildren(h("p", {}, `${seconds(clock)} in all:`, key.flat()), ...rows);
  }
}
