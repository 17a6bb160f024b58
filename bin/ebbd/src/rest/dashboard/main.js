// The page: asks the daemon every two seconds, and shows what it says.

import { Refused, ask, change, ofVm, token } from "./api.js";
import { Chart } from "./chart.js";
import { askLimit, askToken, confirmed, help, isOpen } from "./dialog.js";
import { byId, define, make, say } from "./dom.js";
import { EventList } from "./events.js";
import { bytesOf, exactSize, seconds, size, time } from "./format.js";
import { Past, SPANS, remember } from "./history.js";
import { HostView } from "./host.js";
import { resident } from "./parts.js";
import { Table, WORDS } from "./table.js";
import { Unmanaged, WORDS_OF_UNMANAGED } from "./unmanaged.js";
import { VmView, chartOfParts, chartsOfFaults } from "./vm.js";

const EVERY_MS = 2000;
const WAIT_MOST_MS = 30_000;
/** Time between two questions about the pilot. */
const PILOT_EVERY_MS = 5000;
/** Figures that are older than this are called old. */
const OLD_MS = 6000;
const THEME = "ebb.theme";
const THEMES = [["", "as the system"], ["light", "light"], ["dark", "dark"]];

const table = new Table();
const host = new HostView(setMode);
const list = new EventList();
const unmanaged = new Unmanaged();
const past = new Past(null);
const available = { css: "available", name: "available", of: (moment) => moment.available };
const reserve = { css: "limit", name: "reserve", of: (moment) => moment.reserve };
const charts = [
  chartOfParts("Where the memory of all VMs was"),
  new Chart({
    title: "The host's available memory",
    series: [available],
    lines: [reserve],
    text: size,
    base: 1024,
  }),
  ...chartsOfFaults(", in the slowest VM"),
];

/** What is known: `heardMs` is when the daemon has answered last. */
const known = { role: null, top: null, pilot: null, pilotMs: -Infinity, heardMs: null, view: null };
/** Who waits until the daemon knows this page's token, or needs none. */
const waiting = [];
let isAdmitted = false;
let woken = Promise.withResolvers();

function admitted() {
  return isAdmitted ? Promise.resolve() : new Promise((resolve) => waiting.push(resolve));
}

/** Has the next question asked now. */
function wake() {
  woken.resolve();
}

async function pause(ms) {
  let timer = 0;
  const over = new Promise((resolve) => {
    timer = setTimeout(resolve, ms);
  });
  await Promise.race([over, woken.promise]);
  clearTimeout(timer);
  woken = Promise.withResolvers();
}

/** Waits while nobody looks at the page. */
async function seen() {
  while (document.hidden) {
    await pause(WAIT_MOST_MS);
  }
}

const mayChange = () => known.role === "control" || known.role === "host";

function allow() {
  const roles = { read: "may look", control: "may look and control", host: "on the host itself" };
  say(byId("role"), known.role === null ? "" : roles[known.role] ?? known.role);
  byId("forget").hidden = !token.isKnown();
  host.allow(mayChange());
  known.view?.allow(mayChange());
}

/** Asks once for all that is shown. */
async function look() {
  if (known.role === null) {
    known.role = (await ask("whoami")).role;
    allow();
    isAdmitted = true;
    waiting.splice(0).forEach((resolve) => resolve());
  }
  known.top = await ask("top");
  known.heardMs = performance.now();
  remember(known.top);
  if (known.heardMs - known.pilotMs > PILOT_EVERY_MS) {
    known.pilot = await ask("pilot");
    known.pilotMs = known.heardMs;
  }
  const now = known.top.at_unix_ms;
  // Neither a long history nor a VM that is slow to answer holds up what is now.
  for (const one of known.view ? [known.view, known.view.past] : [past, unmanaged]) {
    one.refresh(now).then((isNew) => isNew && show());
  }
}

function show() {
  const { top, pilot, view } = known;
  if (top === null) {
    return;
  }
  host.show(top);
  table.show(top);
  if (view) {
    view.show(top, pilot);
  } else {
    past.show(charts, top.at_unix_ms);
    say(byId("past-say"), past.trouble ?? "");
  }
  list.saySome(performance.now());
  showAge();
}

/** Says how old the figures are. */
function showAge() {
  const { top, heardMs } = known;
  if (top === null) {
    return;
  }
  const ageMs = performance.now() - heardMs;
  const old = ageMs > OLD_MS ? `, ${seconds(ageMs)} old` : "";
  say(byId("age"), `figures of ${time(top.at_unix_ms)}${old}`);
  byId("age").classList.toggle("bad", old !== "");
}

/** Says what is wrong; "": nothing is. */
function showTrouble(text, wantsToken = false) {
  byId("trouble").hidden = text === "";
  say(byId("trouble-say"), text);
  byId("give-token").hidden = !wantsToken;
}

/** Has somebody give a token. */
async function getToken(error) {
  known.role = null;
  isAdmitted = false;
  const why = token.isKnown()
    ? `${error.message}.`
    : "ebbd answers other machines only if they show a token: one of the file that " +
      "ebbd --tokens names.";
  token.forget();
  allow();
  while (!(await askToken(why))) {
    showTrouble("No token is given, so ebbd tells nothing.", true);
    await new Promise((resolve) => {
      byId("give-token").addEventListener("click", resolve, { once: true });
    });
  }
  showTrouble("");
}

async function run() {
  let wait = EVERY_MS;
  for (;;) {
    await seen();
    try {
      await look();
      showTrouble("");
      wait = EVERY_MS;
    } catch (error) {
      if (error instanceof Refused && error.wantsToken) {
        await getToken(error);
        continue;
      }
      // The next daemon may know other tokens.
      known.role = null;
      showTrouble(`${capital(error.message)}. This page tries again by itself.`);
      wait = Math.min(wait * 2, WAIT_MOST_MS);
    }
    show();
    await pause(wait);
  }
}

function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** Has something changed, and says what came of it. */
async function act(done, run) {
  say(byId("done"), "");
  try {
    await run();
    say(byId("done"), `${done}.`);
  } catch (error) {
    say(byId("done"), `Not done: ${error.message}.`);
  }
  known.pilotMs = -Infinity;
  wake();
}

async function setMode(mode, name, meaning) {
  if (await confirmed(`Set the pilot to: ${name}?`, meaning)) {
    await act(`The pilot is set to: ${name}`, () => change("pilot", { mode }));
  }
}

function hold({ name, hold: isHeld }) {
  const held = `${name} is held: the pilot leaves it as it is`;
  const done = isHeld ? `${name} is no longer held` : held;
  return act(done, () => change(ofVm(name, "rule"), { hold: !isHeld }));
}

async function limit(vm) {
  const text = await askLimit(vm.name, vm.limit_bytes === null ? "" : exactSize(vm.limit_bytes));
  if (text === null) {
    return;
  }
  const bytes = text === "" ? null : bytesOf(text);
  if (bytes === null && text !== "") {
    say(byId("done"), `Not done: ${text} is no size. Write it as 400M or 1.5G.`);
    return;
  }
  const takes = resident(vm.parts) + vm.compressed_in_bytes;
  const what = bytes === null ? "no limit" : `a limit of ${size(bytes)}`;
  const evicts = bytes !== null && takes > bytes
    ? "What is above the limit is evicted, and comes back when the guest touches it."
    : "Nothing is evicted for it now.";
  const pilot = bytes === null
    ? "The pilot may set one again."
    : "The pilot leaves a limit that somebody has set alone.";
  if (await confirmed(`Give ${vm.name} ${what}?`, `It takes ${size(takes)} now. ${evicts} ${pilot}`)) {
    await act(`${vm.name} has ${what}`, () => change(ofVm(vm.name, "limit"), { bytes }));
  }
}

/** The VM that the address names; null: none; undefined: the address is about something else. */
function nameInAddress() {
  if (location.hash !== "" && !location.hash.startsWith("#/")) {
    return undefined;
  }
  const found = /^#\/vm\/(.+)$/.exec(location.hash);
  try {
    return found ? decodeURIComponent(found[1]) : null;
  } catch {
    return null;
  }
}

/** Shows what the address names. */
function route() {
  const name = nameInAddress();
  const before = known.view?.name ?? null;
  if (name === undefined || name === before) {
    return;
  }
  known.view = name === null ? null : new VmView(name, { hold, limit, act });
  document.title = name === null ? "Ebb" : `${name} - Ebb`;
  byId("overview").hidden = name !== null;
  byId("vm").hidden = name === null;
  byId("vm").replaceChildren(...(known.view ? [known.view.element] : []));
  list.choose(name);
  if (known.view) {
    known.view.past.choose(past.spanS);
    known.view.allow(mayChange());
    show();
    known.view.title.focus();
  } else {
    show();
    table.rows.get(before)?.link.focus();
  }
  wake();
}

function onKey(event) {
  if (isOpen() || event.ctrlKey || event.metaKey || event.altKey) {
    return;
  }
  const filter = byId("filter");
  if (event.key === "Escape" && event.target === filter) {
    filter.value = "";
    table.search("");
    filter.blur();
  } else if (event.key === "Escape" && known.view) {
    location.hash = "#/";
  } else if (event.target.matches("input, select, textarea")) {
    return;
  } else if (event.key === "/") {
    event.preventDefault();
    location.hash = "#/";
    route();
    filter.focus();
  } else if (event.key === "?") {
    event.preventDefault();
    help();
  }
}

function setTheme(theme) {
  const found = THEMES.find(([value]) => value === theme) ?? THEMES[0];
  document.documentElement.dataset.theme = found[0];
  localStorage.setItem(THEME, found[0]);
  say(byId("theme"), `Theme: ${found[1]}`);
}

function begin() {
  setTheme(localStorage.getItem(THEME) ?? "");
  byId("theme").addEventListener("click", () => {
    const at = THEMES.findIndex(([value]) => value === document.documentElement.dataset.theme);
    setTheme(THEMES[(at + 1) % THEMES.length][0]);
  });
  byId("span").append(...SPANS.map(([spanS, name]) => make("option", { value: spanS }, name)));
  byId("span").addEventListener("change", ({ target }) => {
    past.choose(Number(target.value));
    known.view?.past.choose(Number(target.value));
    wake();
  });
  byId("forget").addEventListener("click", () => {
    token.forget();
    location.reload();
  });
  byId("show-help").addEventListener("click", help);
  byId("filter").addEventListener("input", ({ target }) => table.search(target.value));
  byId("past-charts").append(...charts.map(({ element }) => element));
  define(byId("help-words"), [...WORDS, ...WORDS_OF_UNMANAGED]);
  document.addEventListener("keydown", onKey);
  document.addEventListener("visibilitychange", wake);
  window.addEventListener("hashchange", route);
  window.addEventListener("resize", show);
  setInterval(showAge, 1000);
  route();
  run();
  list.follow(admitted, ({ type }) => {
    if (type === "decision") {
      known.pilotMs = -Infinity;
    }
  });
}

begin();
