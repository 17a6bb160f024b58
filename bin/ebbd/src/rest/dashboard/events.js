// What happens: the list of events, which goes on by itself.

import { Refused, events } from "./api.js";
import { byId, make, say } from "./dom.js";
import { time } from "./format.js";

/** Events that the list has. */
const KEPT = 200;
const WAIT_MS = { least: 1000, most: 30_000 };
/** Time between two changes of the line that screen readers say. */
const SAY_EVERY_MS = 5000;

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** The list. */
export class EventList {
  constructor() {
    Object.assign(this, { events: [], last: null, vm: null, type: "", saidMs: 0, fresh: 0 });
    byId("events-type").addEventListener("change", ({ target }) => {
      this.type = target.value;
      this.redraw();
    });
  }

  /** Shows those of a VM only; null: of all. */
  choose(vm) {
    this.vm = vm;
    this.redraw();
  }

  isShown(event) {
    const isOfVm = this.vm === null || event.vm === this.vm;
    return isOfVm && (this.type === "" || event.type === this.type);
  }

  redraw() {
    const shown = this.events.filter((event) => this.isShown(event));
    byId("events-list").replaceChildren(...shown.map(lineOf));
    byId("events-none").hidden = shown.length > 0;
  }

  add(event) {
    this.last = Math.max(this.last ?? 0, event.lost?.last ?? event.number);
    this.events.unshift(event);
    this.events.splice(KEPT);
    this.fresh += 1;
    if (this.isShown(event)) {
      const list = byId("events-list");
      list.prepend(lineOf(event));
      while (list.children.length > KEPT) {
        list.lastElementChild.remove();
      }
      byId("events-none").hidden = true;
    }
  }

  /** Says how many are new, seldom. */
  saySome(nowMs) {
    if (this.fresh > 0 && nowMs - this.saidMs >= SAY_EVERY_MS) {
      say(byId("events-say"), `${this.fresh} new ${this.fresh === 1 ? "event" : "events"}`);
      Object.assign(this, { fresh: 0, saidMs: nowMs });
    }
  }

  /**
   * Reads events for ever, and asks again where the daemon has gone. Whoever asks for figures gets
   * a token: `isReady` resolves once there is one.
   */
  async follow(isReady, onEvent) {
    let wait = WAIT_MS.least;
    for (;;) {
      await isReady();
      try {
        for await (const event of events(this.last)) {
          wait = WAIT_MS.least;
          this.add(event);
          onEvent(event);
        }
        say(byId("events-state"), "");
      } catch (error) {
        const why = error instanceof Refused ? error.message : "";
        say(byId("events-state"), why && `No new events: ${why}. This page tries again.`);
      }
      await pause(wait);
      wait = Math.min(wait * 2, WAIT_MS.most);
    }
  }
}

function lineOf({ time: at, type, vm, text }) {
  const moment = make("time", { datetime: at, title: at }, time(Date.parse(at)));
  const about = vm ? make("a", { href: `#/vm/${encodeURIComponent(vm)}` }, vm) : "";
  const kind = make("span", { class: `type ${type}` }, type);
  return make("li", {}, moment, " ", kind, " ", about, " ", text);
}
