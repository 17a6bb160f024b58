// Elements. What the daemon says becomes text, and never HTML.

const SVG = "http://www.w3.org/2000/svg";

/** The element of the page with this id. */
export function byId(id) {
  return document.getElementById(id);
}

/** Makes an element. An attribute that is a function listens to the events of its name. */
export function make(name, attributes = {}, ...children) {
  return furnish(document.createElement(name), attributes, children);
}

/** The same for an element of a picture. */
export function draw(name, attributes = {}, ...children) {
  return furnish(document.createElementNS(SVG, name), attributes, children);
}

function furnish(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") {
      element.addEventListener(name, value);
    } else if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  element.append(...children);
  return element;
}

/** Changes a text, unless it is the same: selections stay, and screen readers say it once. */
export function say(element, text) {
  if (element.textContent !== text) {
    element.textContent = text;
  }
}

/** Changes an attribute, unless it is the same; null removes it. */
export function mark(element, name, value) {
  if (value === null || value === undefined) {
    element.removeAttribute(name);
  } else if (element.getAttribute(name) !== String(value)) {
    element.setAttribute(name, String(value));
  }
}

/** Gives a list of terms and what they mean. The elements that are there already are used again. */
export function define(list, pairs) {
  while (list.children.length > pairs.length) {
    list.lastElementChild.remove();
  }
  pairs.forEach(([term, text], at) => {
    const pair = list.children[at] ?? make("div", {}, make("dt"), make("dd"));
    if (!pair.parentNode) {
      list.append(pair);
    }
    say(pair.firstElementChild, term);
    say(pair.lastElementChild, text);
  });
}
