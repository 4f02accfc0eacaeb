/** Make an element. Properties that start with `on` are listeners, `class`, `aria-*` and `data-*` attributes. */
export function h(tag, properties = {}, ...children) {
  const element = tag === 'svg' || SVG.has(tag) ? document.createElementNS(NAMESPACE, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else if (name === 'style') Object.entries(value).forEach(([key, text]) => element.style.setProperty(key, text));
    else element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const NAMESPACE = 'http://www.w3.org/2000/svg';
const SVG = new Set(['g', 'path', 'line', 'circle', 'rect', 'text', 'polyline']);

export const $ = (id) => document.getElementById(id);

/** A number to read: up to four digits. */
export function figure(value) {
  if (value === null || value === undefined) return '–';
  if (!Number.isFinite(value)) return String(value);
  const digits = Number(value.toPrecision(4));
  return Math.abs(digits) >= 1e6 || (digits && Math.abs(digits) < 1e-4) ? digits.toExponential() : String(digits);
}

/** The least and the greatest of numbers, which may be more than a function takes as arguments. */
export const least = (values) => values.reduce((one, other) => Math.min(one, other), Infinity);
export const greatest = (values) => values.reduce((one, other) => Math.max(one, other), -Infinity);

/** A fraction as the command line prints it. */
export const percent = (fraction) => `${(Math.round(fraction * 1e4) / 100).toFixed(2)}%`;

/** About `count` round numbers from `from` to `to`. */
export function ticks(from, to, count) {
  const rough = (to - from) / Math.max(1, count);
  if (!(rough > 0)) return [from];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * (1 - 1e-9));
  const found = [];
  for (let k = Math.ceil(from / step - 1e-9); k * step <= to * (1 + 1e-9); k += 1) found.push(Number((k * step).toPrecision(12)));
  return found;
}

/** Copy a text, and say on the button whether the browser allows it; a page without HTTPS may not copy. */
export async function copyText(button, label, text) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = 'Copied';
  } catch {
    button.textContent = 'Copying is not allowed';
  }
  setTimeout(() => { button.textContent = label; }, 1500);
}

/** Save a file on the reader's disk. */
export function download(name, content, type = 'text/plain') {
  const link = h('a', { href: URL.createObjectURL(new Blob([content], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
