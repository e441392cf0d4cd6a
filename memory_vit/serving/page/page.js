// The page of the server: answers of all tasks, the attention of their tokens, and
// changes of tasks. Names come from strangers: they are only ever set as text.
"use strict";

const $ = (id) => document.getElementById(id);
// The server says how many images it takes at once.
const limits = { images: 8 };

function element(tag, options = {}, ...children) {
  const found = Object.assign(document.createElement(tag), options);
  found.append(...children);
  return found;
}

function say(place, text, isError = false) {
  place.textContent = text;
  place.classList.toggle("error", isError);
}

// The JSON of an answer, or an Error with the server's one line.
async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Error("The server cannot be reached.");
  }
  let body = {};
  try {
    body = await response.json();
  } catch {
    // Without JSON there is only the status.
  }
  if (!response.ok) {
    const error = new Error(body.error || `The server answered with status ${response.status}.`);
    error.images = body.images;
    throw error;
  }
  return body;
}

// With a no-break space.
const percent = (share) => `${(100 * share).toFixed(1)}\u00a0%`;
const plural = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;

// Images ---------------------------------------------------------------------

function form(files, fields = {}) {
  const data = new FormData();
  for (const file of files) data.append("images", file, file.name);
  for (const [name, value] of Object.entries(fields)) data.append(name, value);
  return data;
}

async function predict(files) {
  if (!files.length) return;
  $("drop").setAttribute("aria-busy", "true");
  let done = 0, bad = 0;
  for (let i = 0; i < files.length; i += limits.images) {
    const some = files.slice(i, i + limits.images);
    say($("progress"), `Predicting ${plural(files.length, "image")} …`);
    let answers;
    try {
      const answer = await ask("v1/predict", { method: "POST", body: form(some) });
      answers = answer.images;
    } catch (error) {
      if (!error.images) {
        say($("progress"), error.message, true);
        $("drop").removeAttribute("aria-busy");
        return;
      }
      answers = error.images;
    }
    answers.forEach((answer, j) => {
      $("results").prepend(card(some[j], answer));
      if (answer.error) bad += 1; else done += 1;
    });
  }
  $("drop").removeAttribute("aria-busy");
  const failed = bad ? `, ${bad} could not be read` : "";
  say($("progress"), `${plural(done, "image")} answered${failed}.`);
}

function card(file, answer) {
  const title = element("h3", { textContent: file.name });
  const picture = element("div", { className: "picture" });
  if (answer.error) {
    const problem = element("p", { className: "error", textContent: answer.error });
    picture.append(title);
    return element("li", {}, picture, problem);
  }
  const image = element("img", { alt: "", src: URL.createObjectURL(file) });
  image.addEventListener("load", () => URL.revokeObjectURL(image.src), { once: true });
  picture.append(image, title);
  const answers = element("div", { className: "answers" });
  for (const [name, answered] of Object.entries(answer.tasks)) {
    answers.append(answersOf(name, answered));
  }
  const problems = Object.entries(answer.task_errors ?? {});
  for (const [name, problem] of problems) {
    answers.append(element("p", { className: "error", textContent: `${name}: ${problem}` }));
  }
  const item = element("li", {}, picture, answers);
  if (Object.keys(answer.tasks).length) {
    const button = element("button", { type: "button", className: "plain", textContent: "Show attention" });
    button.setAttribute("aria-label", `Show the attention of tasks in ${file.name}`);
    button.addEventListener("click", () => showLooks(item, file, button));
    picture.append(button);
  } else if (!problems.length) {
    answers.append(element("p", { textContent: "There is no task that could answer." }));
  }
  return item;
}

// A list of classes, {classes: [...], unknown}, {labels: [...]} or {values: [...]}.
function answersOf(name, answered) {
  const list = element("ol");
  const line = (first, second, share = 0) => {
    const row = element("li", {},
      element("span", { textContent: first }), element("span", { textContent: second }));
    row.style.backgroundSize = `${100 * share}% 100%`;
    list.append(row);
  };
  const { classes = [], labels, values = [], unknown = false } =
    Array.isArray(answered) ? { classes: answered } : answered;
  if (unknown) line("unknown", "");
  for (const { name: value, value: number, unit } of values) {
    line(value, `${Number(number.toPrecision(4))}\u00a0${unit}`.trim());
  }
  for (const guess of labels ?? classes) {
    line(guess.label ?? guess.class, percent(guess.probability), guess.probability);
  }
  if (labels?.length === 0) line("no label", "");
  return element("section", {}, element("h3", { textContent: name }), list);
}

// Attention of tokens --------------------------------------------------------

// Dark to bright with even steps of lightness, as (red, green, blue).
const STOPS = [[0, 0, 4], [87, 16, 110], [188, 55, 84], [249, 142, 9], [252, 255, 164]];

function colour(value) {
  const place = Math.min(Math.max(value, 0), 1) * (STOPS.length - 1);
  const i = Math.min(Math.floor(place), STOPS.length - 2);
  return STOPS[i].map((low, c) => low + (place - i) * (STOPS[i + 1][c] - low));
}

async function showLooks(item, file, button) {
  button.disabled = true;
  try {
    const found = await ask("v1/attention", { method: "POST", body: form([file]) });
    const view = new Image();
    view.src = found.view;
    await view.decode();
    item.append(looks(found, view, file.name));
    button.remove();
    item.querySelector(".looks select").focus();
  } catch (error) {
    button.disabled = false;
    say($("progress"), error.message, true);
  }
}

function looks(found, view, fileName) {
  const names = Object.keys(found.tasks);
  const layers = found.tasks[names[0]].patches.length;
  const canvas = element("canvas", { width: 448, height: 448 });
  canvas.setAttribute("role", "img");
  const tasks = element("select", {}, ...names.map((n) => element("option", { value: n, textContent: n })));
  const layer = element("input", { type: "range", min: 0, max: layers, value: 0, step: 1 });
  const strength = element("input", { type: "range", min: 0, max: 100, value: 65 });
  const shown = element("output");
  const shares = element("p", { className: "shares" });
  const draw = () => {
    const chosen = Number(layer.value);
    const all = found.tasks[tasks.value];
    const where = chosen ? `layer ${chosen} of ${layers}` : `mean of ${layers} layers`;
    shown.textContent = chosen ? `${chosen} of ${layers}` : where;
    layer.setAttribute("aria-valuetext", where);
    canvas.setAttribute("aria-label", `Attention of ${tasks.value} in ${fileName}, ${where}`);
    paint(canvas, view, patches(all, chosen), found, Number(strength.value) / 100);
    const pick = (values) => chosen ? values[chosen - 1] : mean(values);
    const sums = all.patches.map((row) => row.reduce((a, b) => a + b, 0));
    shares.textContent = `Attention to patches: ${percent(pick(sums))}, ` +
      `to the class token: ${percent(pick(all.class_token))}, ` +
      `to its own memory and tokens of tasks: ${percent(pick(all.rest))}.`;
  };
  for (const control of [tasks, layer, strength]) control.addEventListener("input", draw);
  draw();
  const controls = element("div", { className: "controls" },
    element("label", {}, "Task", tasks),
    element("label", {}, element("span", {}, "Layer: ", shown), layer),
    element("label", {}, "Strength of the overlay", strength),
    shares);
  return element("div", { className: "looks" }, canvas, controls);
}

const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;

// Weights of the patches in one layer, from 1; or their mean, for 0.
function patches(all, layer) {
  if (layer) return all.patches[layer - 1];
  return all.patches[0].map((_, i) => mean(all.patches.map((row) => row[i])));
}

function paint(canvas, view, weights, found, strength) {
  const [rows, columns] = [found.rows, found.columns];
  const most = Math.max(...weights) || 1;
  const small = element("canvas", { width: columns, height: rows });
  const pixels = new ImageData(columns, rows);
  weights.forEach((weight, i) => {
    pixels.data.set([...colour(weight / most), 255], 4 * i);
  });
  small.getContext("2d").putImageData(pixels, 0, 0);
  const context = canvas.getContext("2d");
  context.globalAlpha = 1;
  context.imageSmoothingEnabled = true;
  context.drawImage(view, 0, 0, canvas.width, canvas.height);
  context.globalAlpha = strength;
  context.drawImage(small, 0, 0, canvas.width, canvas.height);
}

// Tasks ----------------------------------------------------------------------

async function refresh() {
  let found;
  try {
    found = await ask("v1/tasks");
  } catch (error) {
    say($("server"), error.message, true);
    return;
  }
  limits.images = found.max_images;
  const { variant, image_size: side, fingerprint } = found.backbone;
  say($("server"),
    `${plural(found.tasks.length, "task")} on one ${variant} at ${side} pixels ` +
    `(fingerprint ${fingerprint.slice(0, 12)}), in one pass. Set of tasks: ${found.task_set.digest.slice(0, 12)}.`);
  $("none").hidden = found.tasks.length > 0;
  $("locked").hidden = found.changes;
  $("change").hidden = !found.changes;
  $("tasks").replaceChildren(...found.tasks.map((task) => taskRow(task, found.changes)));
}

function outputs({ classes, kind }) {
  const one = { classes: "class", labels: "label", values: "value" }[kind.name];
  return `${classes} ${classes === 1 ? one : kind.name}`;
}

function taskRow(task, changes) {
  const cell = (textContent, className = "") => element("td", { textContent, className });
  const row = element("tr", {},
    element("th", { scope: "row", textContent: task.name }),
    cell(outputs(task), "number"),
    cell(task.cells, "number"),
    cell(task.regime),
    cell(task.parents.join(", ") || "–"),
    element("td", {}, element("code", { textContent: task.digest.slice(0, 12), title: task.digest })));
  // On a phone each value is beside the name of its column.
  document.querySelectorAll("thead th").forEach((th, i) => { row.children[i].dataset.column = th.textContent; });
  const last = element("td");
  if (changes) {
    const button = element("button", { type: "button", className: "plain", textContent: "Remove" });
    button.setAttribute("aria-label", `Remove ${task.name}`);
    button.addEventListener("click", () => removeTask(task.name));
    last.append(button);
  }
  row.append(last);
  return row;
}

function authorized(more = {}) {
  return { ...more, Authorization: `Bearer ${$("token").value}` };
}

async function change(name, options) {
  say($("changed"), "One moment …");
  try {
    const done = await ask(`v1/tasks/${encodeURIComponent(name)}`, options);
    const what = { add: "added", replace: "replaced", remove: "removed" }[done.action];
    const grew = done.grew ? `, and ${plural(done.compiled, "program")} compiled for it` : "";
    say($("changed"), `${name} was ${what}${grew}.`);
    return true;
  } catch (error) {
    say($("changed"), error.message, true);
    return false;
  } finally {
    await refresh();
  }
}

async function removeTask(name) {
  if (!$("token").value) {
    say($("changed"), "To remove a task, enter the token of the server first.", true);
    $("token").focus();
    return;
  }
  if (!window.confirm(`Remove the task ${name}? It stops answering at once.`)) return;
  await change(name, { method: "DELETE", headers: authorized() });
}

async function addTask(event) {
  event.preventDefault();
  const button = $("change").querySelector("button");
  button.disabled = true;
  const headers = authorized({ "Content-Type": "application/octet-stream" });
  const added = await change($("name").value, { method: "PUT", headers, body: $("file").files[0] });
  button.disabled = false;
  if (added) {
    $("file").value = "";
    $("name").value = "";
    $("file").focus();
  }
}

// Suggest a task name from the file name.
function suggestName() {
  const [file] = $("file").files;
  if (file && !$("name").value) {
    const name = file.name.toLowerCase().replace(/\.safetensors$/, "");
    $("name").value = name.replace(/[^a-z0-9_-]+/g, "-").replace(/^[-_]+/, "").slice(0, 64);
  }
}

function start() {
  const drop = $("drop");
  $("files").addEventListener("change", async () => {
    const files = [...$("files").files];
    $("files").value = "";
    await predict(files);
  });
  for (const kind of ["dragenter", "dragover"]) {
    drop.addEventListener(kind, (event) => {
      event.preventDefault();
      drop.classList.add("over");
    });
  }
  drop.addEventListener("dragleave", () => drop.classList.remove("over"));
  drop.addEventListener("drop", async (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    await predict([...event.dataTransfer.files]);
  });
  $("change").addEventListener("submit", addTask);
  $("file").addEventListener("change", suggestName);
  refresh();
}

start();
