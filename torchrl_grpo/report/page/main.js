// Starts the page: tabs, and the way from a step of a curve to its rollouts.

async function main() {
  const data = await readData();
  let run = data.runs[0];
  document.title = document.getElementById("title").textContent = data.runs.map((each) => each.name).join(" and ");
  const host = document.getElementById("main");
  let current = "";
  // The address names the run, if there are several.
  const remember = (filters = {}) => address.write(current, { ...filters, run: data.runs.indexOf(run) || "" });

  function openRollouts(filters) {
    go("rollouts", filters);
  }

  // Opens the round that a step trained on, which is under its first step.
  function openStep(step, of = run) {
    if (of !== run) show(of);
    let round = -1;
    for (const start of run.rollouts.step) if (start <= step && start > round) round = start;
    openRollouts(round < 0 ? {} : { from: String(round), to: String(round) });
  }

  const viewsOf = (each) => ({
    rollouts: new Rollouts(each, (filters) => { if (current === "rollouts") remember(filters); }), problems: new Problems(each, openRollouts), timeline: new Timeline(each),
  });
  const views = { ...(data.differences ? { differences: new Differences(data) } : {}), overview: new Overview(data, openStep), curves: new Curves(data, openStep), ...viewsOf(run) };
  const tabs = Object.keys(views).map((name) => h("button", { id: `tab-${name}`, onclick: () => go(name) }, name[0].toUpperCase() + name.slice(1)));
  document.getElementById("tabs").append(...tabs);
  const choice = h("select", { id: "run", onchange: () => { show(data.runs[choice.value]); go(current); } }, data.runs.map((each, at) => h("option", { value: at }, each.name)));
  if (data.runs.length > 1) document.getElementById("tabs").append(choice);

  // Rollouts, problems and timeline are of one run.
  function show(each) {
    run = each;
    choice.value = data.runs.indexOf(run);
    Object.assign(views, viewsOf(run));
  }

  function go(name, filters) {
    current = name;
    for (const tab of tabs) tab.classList.toggle("on", tab.id === `tab-${name}`);
    host.replaceChildren(views[name].element);
    if (name !== "rollouts") remember();
    views[name].show(filters);
    scrollTo(0, 0);
  }

  const { tab, filters } = address.read();
  if (data.runs[filters.run]) show(data.runs[filters.run]);
  go(Object.hasOwn(views, tab) ? tab : tabs[0].id.slice(4), tab === "rollouts" ? filters : undefined);
  document.body.dataset.ready = "yes";
  if (data.watched) watch();
}

// Loads the page again when its files have changed. The server then answers with another tag.
function watch() {
  let tag = null;
  setInterval(async () => {
    const answer = await fetch(location.pathname, { method: "HEAD", cache: "no-store" }).catch(() => null);
    if (answer === null || !answer.ok) return;
    const newest = answer.headers.get("ETag");
    if (tag !== null && newest !== tag) location.reload();
    tag = newest;
  }, 3000);
}

main().catch((error) => {
  document.getElementById("main").replaceChildren(h("p", { className: "bad", id: "failure" }, `This report cannot be read: ${error.message}`));
  throw error;
});
