// The comparison of a sweep: which setting won, the table of all settings, and their learning curves.

function main() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { sweep } = data;
  document.title = document.getElementById("title").textContent = `Sweep ${sweep.name}`;
  const row = (cells, tag = "td") => h("tr", {}, cells.map((cell) => h(tag, {}, cell)));
  const table = h("table", { id: "settings" }, row(sweep.table[0], "th"), sweep.table.slice(1).map((cells) => row(cells)));
  const trials = sweep.trials.map((trial) => row([trial.name, trial.seed, trial.state, ...trial.values.slice(-1).map((value) => digits(value))].map(String)));
  // Curves take runs, and a setting is one whose values are means.
  const runs = sweep.curves.map((curve) => ({ ...curve, findings: [], metrics: Object.fromEntries(Object.entries(curve.metrics).map(([name, values]) => [name, values.map((value) => value ?? NaN)])) }));
  const curves = new Curves({ ...data, runs }, () => {});
  curves.hint = "Means over the seeds, with 95 % intervals over seeds. Drag to zoom, double-click to see all again.";
  curves.note = "Colors are settings.";
  document.getElementById("main").replaceChildren(
    h("section", {}, sweep.verdict.map((line) => h("p", {}, line)), table),
    curves.element,
    h("section", {}, h("h2", {}, "Trials"), h("table", { id: "trials" }, row(["folder", "seed", "state", "held-out"], "th"), trials)),
  );
  curves.show();
  document.body.dataset.ready = "yes";
}

main();
