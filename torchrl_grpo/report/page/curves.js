// Curves of the metrics, with one cursor and one zoom for all.

const isPart = (name) => name.startsWith("reward/") && !/^reward\/(mean|std|constant_groups|errors|error_share)$/.test(name);
const PANELS = [
  { title: "Reward and its parts", match: (name) => name === "reward/mean" || isPart(name) },
  { title: "Held-out value, with 95 % interval", match: (name) => /^eval\/(accuracy|primary|loss|pass_at_\d+)$/.test(name), bands: true },
  { title: "Signal: groups with equal rewards, advantage", match: /^(reward\/constant_groups|reward\/error_share|advantage\/abs_mean|rollout\/refills)$/ },
  { title: "KL divergence, nats per token", match: /^kl\// },
  { title: "Entropy, nats per token", match: /^policy\/entropy$/ },
  { title: "Clip fraction and effective sample size", match: /^policy\/(clip_fraction|correction_zero|ess)$/ },
  { title: "Lengths, tokens", match: /^(response\/length_|eval\/response_length)/ },
  { title: "Truncated and failed responses, share", match: /^(response\/truncated|episode\/failed)$/ },
  { title: "Mismatch of engine and trainer", match: /^(mismatch\/|policy\/logprob_diff|publish\/logprob_diff)/ },
  { title: "Loss and its terms", match: /^loss\// },
  { title: "Gradient norm", match: /^optimizer\/grad_norm$/ },
  { title: "Learning rate", match: /^optimizer\/lr$/ },
  { title: "Seconds by phase", match: /^(time\/|workers\/(wait|score)_s)/ },
  { title: "Memory, GiB", match: /^memory\// },
  { title: "Age of the weights that sampled, rounds", match: /^policy\/(age_mean|age_max|mixed)$/ },
  { title: "Tokens per second", match: /^throughput\/(generated|trained)_tokens_per_s$|^workers\/tokens_per_s(_min|_max)?$/ },
  { title: "Workers", match: /^workers\/(busy_share(_min|_max)?|overlap|queue|restarts)$/ },
  { title: "Episodes", match: /^episode\/(turns|tool_)/ },
  { title: "Data", match: /^data\// },
];

class Curves {
  constructor(data, openStep) {
    Object.assign(this, { data, openStep, charts: [] });
    this.hint = "Drag to zoom all curves, double-click to see all again, click to open the rollouts of a step. Dashed lines are findings.";
    this.note = data.runs.length > 1 ? `In a chart of one metric, colors are runs. Otherwise colors are metrics, and lines of ${data.runs[0].name} are solid.` : "";
    this.findings = data.runs.flatMap((run) => run.findings);
    this.element = h("section", {});
  }

  show() {
    if (this.charts.length || this.element.childElementCount) return;
    const names = [...new Set(this.data.runs.flatMap((run) => Object.keys(run.metrics)))].sort();
    if (this.data.missing) {
      this.element.append(h("p", { className: "bad", id: "no-library" }, this.data.missing));
      return;
    }
    const grid = h("div", { className: "charts" });
    const choice = h("select", { id: "other-metric" }, h("option", { value: "" }, "any other metric ..."), names.map((name) => h("option", { value: name }, name)));
    choice.onchange = () => {
      if (!choice.value) return;
      this.addChart(grid, { title: choice.value }, [choice.value], true);
      choice.value = "";
    };
    this.element.append(h("p", { className: "note" }, this.hint, " ", choice), grid);
    if (this.note) this.element.prepend(h("p", { className: "note" }, this.note));
    const graders = [...new Set(this.data.runs.map((run) => run.about?.right.reward).filter(Boolean))];
    for (const panel of PANELS) {
      const test = panel.match instanceof RegExp ? (name) => panel.match.test(name) : panel.match;
      const present = names.filter(test);
      const title = panel.bands && graders.length ? `Held-out value by ${graders.join(", ")}, with 95 % interval` : panel.title;
      if (present.length) this.addChart(grid, { ...panel, title }, present);
    }
  }

  // Values of all runs over the union of their steps.
  table(names, bands) {
    const { runs } = this.data;
    const steps = [...new Set(runs.flatMap((run) => [...run.steps]))].sort((a, b) => a - b);
    const at = new Map(steps.map((step, index) => [step, index]));
    const columns = [steps];
    const series = [{ label: "step" }];
    const ribbons = [];
    const add = (run, name, label, options) => {
      const values = new Array(steps.length).fill(null);
      run.metrics[name].forEach((value, index) => { if (!Number.isNaN(value)) values[at.get(run.steps[index])] = value; });
      columns.push(values);
      series.push({ label, spanGaps: true, value: (_, value) => digits(value), points: { size: 5 }, ...options });
    };
    // Of several metrics, the color tells the metric and the dashes the run.
    runs.forEach((run, number) => names.forEach((name, at) => {
      if (!run.metrics[name]) return;
      const stroke = COLORS[(names.length > 1 ? at : number) % COLORS.length];
      const label = runs.length > 1 ? `${run.name}: ${name}` : name;
      add(run, name, label, { stroke, width: 2, dash: names.length > 1 && number ? [8 / number, 4] : [] });
      if (bands && run.metrics[`${name}_low`]) {
        add(run, `${name}_high`, `${label} high`, { stroke: `${stroke}60`, width: 1, points: { show: false } });
        add(run, `${name}_low`, `${label} low`, { stroke: `${stroke}60`, width: 1, points: { show: false } });
        ribbons.push({ series: [series.length - 2, series.length - 1], fill: `${stroke}22` });
      }
    }));
    return { columns, series, ribbons };
  }

  addChart(grid, panel, names, first = false) {
    const { columns, series, ribbons } = this.table(names, panel.bands);
    const holder = h("div", { className: "chart", dataset: { title: panel.title } }, h("h3", {}, panel.title));
    if (first) grid.prepend(holder); else grid.append(holder);
    const ink = getComputedStyle(document.body).color;
    const axis = { stroke: ink, grid: { stroke: "#8883", width: 1 }, ticks: { stroke: "#8883" } };
    const chart = new uPlot({
      width: holder.clientWidth, height: 200, series, bands: ribbons,
      scales: { x: { time: false } },
      axes: [{ ...axis, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5] }, { ...axis, size: 62, values: (_, splits) => splits.map((value) => digits(value, 3)) }],
      cursor: { sync: { key: "curves" }, drag: { x: true, y: false } },
      hooks: { draw: [(u) => this.drawFindings(u)], setScale: [(u, key) => this.zoomOthers(u, key)] },
    }, columns, holder);
    let from = 0;
    let timer = 0;
    chart.over.addEventListener("mousedown", (event) => { from = event.clientX; });
    chart.over.addEventListener("click", (event) => {
      const at = chart.cursor.idx;
      // A second click soon after makes it a double-click, which ends the zoom.
      clearTimeout(timer);
      if (Math.abs(event.clientX - from) < 4 && at !== null && event.detail === 1) timer = setTimeout(() => this.openStep(columns[0][at]), 300);
    });
    this.charts.push(chart);
    new ResizeObserver(() => { if (holder.clientWidth) chart.setSize({ width: holder.clientWidth, height: 200 }); }).observe(holder);
  }

  zoomOthers(chart, key) {
    if (key !== "x") return;
    const { min, max } = chart.scales.x;
    for (const other of this.charts) {
      if (other !== chart && (other.scales.x.min !== min || other.scales.x.max !== max)) other.setScale("x", { min, max });
    }
  }

  drawFindings(chart) {
    const { ctx, bbox } = chart;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = "#b3261e";
    ctx.setLineDash([4, 4]);
    this.findings.forEach((finding, number) => {
      const x = chart.valToPos(finding.since, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) return;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.fillText(String(number + 1), x + 3, bbox.top + 10 * devicePixelRatio);
    });
    ctx.restore();
  }
}
