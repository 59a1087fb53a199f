// Unpacks the data of the page, and makes elements. Text becomes text nodes and can never be markup.

const TYPES = { i: Int32Array, f: Float32Array, d: Float64Array, B: Uint8Array };
const COLORS = ["#2563a8", "#c2571a", "#1a7f4b", "#8e44ad", "#b3261e", "#0e8a96", "#a07a00", "#667080", "#d3548f", "#4b5cc4"];

function bytesOf(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

async function inflate(text) {
  const stream = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

async function unpack(value) {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return value;
  if (typeof value.deflate === "string" && TYPES[value.type]) return new TYPES[value.type](await inflate(value.deflate));
  const entries = await Promise.all(Object.entries(value).map(async ([name, entry]) => [name, await unpack(entry)]));
  return Object.fromEntries(entries);
}

const readJson = async (text) => JSON.parse(new TextDecoder().decode(await inflate(text)));

async function readData() {
  const data = JSON.parse(document.getElementById("data").textContent);
  data.runs = await Promise.all(data.runs.map(async (run) => {
    // What a run says about itself is not packed, and may look as if it were.
    const { about, texts, ...packed } = run;
    return { ...(await unpack(packed)), about, texts: await readJson(texts) };
  }));
  if (data.differences) data.differences = await readJson(data.differences);
  return data;
}

// An element with properties, and with children that are elements or texts.
function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "style") Object.assign(element.style, value);
    else if (name === "dataset") Object.assign(element.dataset, value);
    else element[name] = value;
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

function digits(value, count = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  const text = size !== 0 && size < 1e-3 ? value.toExponential(count - 1) : value.toPrecision(count);
  return text.includes(".") ? text.replace(/\.?0+(?=$|e)/, "") : text;
}

// What the held-out value of a run is, and what grades it.
function heldOutLabel(run) {
  const { reward } = run.about.right;
  const kind = run.held_out.metric.slice(5);
  if (kind === "primary") return reward ? `mean of ${reward}` : kind;
  return reward && kind === "accuracy" ? `accuracy by ${reward}` : kind;
}

// The pictures of a prompt, by their names. They are data URLs.
function pictures(run, names) {
  return (names || []).map((name) => (run.texts.pictures[name]
    ? h("img", { className: "picture", src: run.texts.pictures[name], alt: name, title: name })
    : h("p", { className: "note" }, `The picture ${name} is not in the report.`)));
}

// The end of a prompt, where the question is, in one line.
function question(prompt) {
  return prompt.replaceAll(/<\|[a-z_]+\|>|\s+/g, " ").trim().slice(-110);
}

function seconds(value) {
  if (value >= 3600) return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
  return value >= 60 ? `${Math.floor(value / 60)} min ${Math.round(value % 60)} s` : `${digits(value, 3)} s`;
}

// Tab and filters stand in the address, so that a link or a reload shows the same.
const address = {
  read() {
    const [tab, query] = location.hash.slice(1).split("?");
    return { tab, filters: Object.fromEntries(new URLSearchParams(query || "")) };
  },
  write(tab, filters = {}) {
    const query = new URLSearchParams(Object.entries(filters).filter(([, value]) => value !== "" && value !== null)).toString();
    history.replaceState(null, "", `#${tab}${query ? `?${query}` : ""}`);
  },
};
