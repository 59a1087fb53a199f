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
    const ofWorkers = metrics["workers/busy_share"] ? ` A bar of workers is a share and not a moment: it is as high as the share of time in which they generated, on average, and as wide as the time that the share is of.` : "";
    this.element.append(h("p", { className: "note" }, `Phases of the trainer's first process and what it calls, end to end. Other ranks train in the same phases, and their times are not measured. Hatched is idle. Checkpoints are written between steps and are not measured.${ofWorkers}`),
      h("div", { className: "filters" }, h("label", {}, "steps ", this.from), h("label", {}, "to ", this.to)), this.tracks);
    this.draw();
  }

  draw() {
    const { steps, metrics } = this.run;
    const value = (name, at) => { const number = metrics[name]?.[at]; return number > 0 ? number : 0; };
    const lanes = new Map();
    const totals = new Map();
    // A share says how much of the time between two moments a lane was busy. Without one, it was busy all the time.
    const put = (lane, start, length, color, title, share = 1) => {
      if (!lanes.has(lane)) lanes.set(lane, []);
      lanes.get(lane).push({ start, length, color, title, share });
    };
    let clock = 0;
    // Up to here workers were measured.
    let measured = 0;
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
      // Its workers are measured when a round is there and prepared, since the round before.
      const end = begin + value("time/wait_s", at) + value("time/prepare_s", at);
      const share = metrics["workers/busy_share"]?.[at];
      if (share >= 0) {
        const of = (name, scale = 1) => digits(metrics[`workers/${name}`]?.[at] * scale, 3);
        put("workers, mean", measured, end - measured, "#2563a8", `workers, up to the round of step ${steps[at]}: busy ${digits(share * 100, 3)} % of the time, the least busy ${of("busy_share_min", 100)} %, the busiest ${of("busy_share_max", 100)} %; the slowest is worker ${of("slowest")} with ${of("tokens_per_s_min")} tokens/s, on average ${of("tokens_per_s")}`, share);
        measured = end;
      }
    }
    for (const [lane] of [...lanes].filter(([name]) => name.startsWith("worker"))) put(lane, measured, clock - measured, "var(--soft)", "measured with the next round", null);
    const position = (part) => `${(100 * part) / (clock || 1)}%`;
    const rows = [...lanes].map(([lane, blocks]) => {
      const sum = (lengthOf) => blocks.reduce((total, block) => total + lengthOf(block), 0);
      const busy = sum(({ length, share }) => length * share), unknown = sum(({ length, share }) => (share === null ? length : 0));
      return h("div", { className: "lane", dataset: { lane } }, h("b", {}, `${lane} ${digits((100 * busy) / (clock - unknown || 1), 2)} %`),
        h("div", { className: "track" }, blocks.slice(0, 4000).map(({ title, start, length, color, share }) => h("i", { title, style: { left: position(start), width: position(length), top: `${100 * (1 - (share ?? 1))}%`, background: color } }))));
    });
    const key = PHASES.filter(([, , label]) => totals.has(label)).map(([, , label, color]) => [h("i", { className: "key", style: { background: color } }), `${label} ${seconds(totals.get(label))}`]);
    this.tracks.replaceChildren(h("p", {}, `${seconds(clock)} in all:`, key.flat()), ...rows);
  }
}
