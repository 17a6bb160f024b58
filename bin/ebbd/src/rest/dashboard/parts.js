// Where a VM's memory is: parts that add up to its size.

import { draw, mark, make, say } from "./dom.js";
import { size } from "./format.js";

/** The parts, in the order in which bars and charts stack them. `key` is also the class of CSS. */
export const PARTS = [
  { key: "in-use", name: "in use", meaning: "resident, and not free in the guest" },
  { key: "free", name: "free", meaning: "resident, and free in the guest" },
  { key: "compressed", name: "compressed", meaning: "evicted to compressed memory" },
  { key: "swapped", name: "swapped", meaning: "evicted to the swap file" },
  {
    key: "disk-backed",
    name: "disk-backed",
    meaning: "evicted, because a disk of the guest has the same content",
  },
  {
    key: "empty",
    name: "empty",
    meaning: "reclaimed, in the balloon, never used or zero: takes nothing",
  },
];

/** Bytes of a part; null: not known. */
export function bytesOfPart(parts, key) {
  return parts ? parts[`${key.replaceAll("-", "_")}_bytes`] ?? null : null;
}

/** The part that takes host memory. */
export function resident(parts) {
  return parts ? parts.in_use_bytes + (parts.free_bytes ?? 0) : 0;
}

/** The sum of the parts of several VMs; null: none is known. */
export function sumOfParts(vms) {
  const known = vms.map((vm) => vm.parts).filter((parts) => parts !== null);
  if (known.length === 0) {
    return null;
  }
  const sum = {};
  for (const { key } of PARTS) {
    const bytes = known.reduce((all, parts) => all + (bytesOfPart(parts, key) ?? 0), 0);
    sum[`${key.replaceAll("-", "_")}_bytes`] = bytes;
  }
  return sum;
}

/** What a bar says to those who do not see it. */
export function inWords(parts) {
  if (!parts) {
    return "not known where its memory is";
  }
  const words = PARTS.map(({ key, name }) => `${name} ${size(bytesOfPart(parts, key))}`);
  return words.join(", ");
}

const WIDTH = 100;

/** A bar, as wide as its place. */
export class Bar {
  constructor(name) {
    this.element = draw("svg", {
      class: "bar",
      viewBox: `0 0 ${WIDTH} 10`,
      preserveAspectRatio: "none",
      role: "img",
    });
    this.name = name;
    this.rects = [];
  }

  /** Shows pieces of a whole: `{ css, bytes }`, from left to right, and a mark at so many bytes. */
  show(pieces, whole, words, markAt = null) {
    mark(this.element, "aria-label", `${this.name}: ${words}`);
    const marks = markAt === null ? [] : [{ css: "mark", from: markAt, bytes: whole / 250 }];
    let from = 0;
    const placed = pieces.map((piece) => {
      const place = { ...piece, from };
      from += piece.bytes;
      return place;
    });
    [...placed, ...marks].forEach(({ css, from: begin, bytes }, at) => {
      const rect = this.rects[at] ?? draw("rect", { y: 0, height: 10 });
      if (!this.rects[at]) {
        this.rects.push(rect);
        this.element.append(rect);
      }
      const scale = WIDTH / Math.max(whole, 1);
      mark(rect, "class", css);
      mark(rect, "x", (begin * scale).toFixed(2));
      mark(rect, "width", (bytes * scale).toFixed(2));
    });
  }

  /** Shows where memory is. */
  showParts(parts, whole) {
    const pieces = PARTS.map(({ key }) => ({ css: key, bytes: bytesOfPart(parts, key) ?? 0 }));
    this.show(pieces, whole, inWords(parts));
  }
}

/** What the colours mean, with sizes. */
export class Legend {
  constructor() {
    this.texts = PARTS.map(() => make("span"));
    const items = PARTS.map(({ key, meaning }, at) =>
      make("li", { title: meaning }, swatch(key), this.texts[at]),
    );
    this.element = make("ul", { class: "legend" }, ...items);
  }

  show(parts) {
    PARTS.forEach(({ key, name }, at) => {
      say(this.texts[at], `${name} ${size(bytesOfPart(parts, key))}`);
    });
  }
}

/** A small field of a colour. */
export function swatch(css) {
  const field = draw("rect", { width: 10, height: 10, class: css });
  return draw("svg", { class: "swatch", viewBox: "0 0 10 10", "aria-hidden": "true" }, field);
}
