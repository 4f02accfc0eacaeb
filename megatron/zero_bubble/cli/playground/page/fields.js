import { h } from './dom.js';

const MOST_SLIDERS = 16; // ranks that get a slider each

export const UNIT = 'M_B is the memory that one microbatch holds on a whole rank between F and B.';

export const SHARED = [
  { title: 'Pipeline', fields: [
    { flag: 'pipeline-size', label: 'Ranks', min: 2, max: 32 },
    { flag: 'num-microbatches', label: 'Microbatches', min: 1, max: 128 },
  ] },
  { title: 'Times', note: 'of one microbatch on a whole rank', fields: [
    { flag: 'time-f', empty: '1', label: 'Forward', kind: 'F', max: 30, step: 0.1, each: 0, initial: 1 },
    { flag: 'time-b', empty: '1', label: 'Input gradient', kind: 'B', max: 30, step: 0.1, each: 0, initial: 1 },
    { flag: 'time-w', empty: '1', label: 'Weight gradient', kind: 'W', max: 30, step: 0.1, each: 0, initial: 1 },
    { flag: 'time-r', label: 'Recomputation', kind: 'R', max: 30, step: 0.1, each: 0, empty: 'as F', needs: 'recompute' },
    { flag: 'time-d', empty: '0', label: 'Copy to the host, and back', kind: 'D', max: 30, step: 0.1, each: 0 },
    { flag: 'time-comm', empty: '0', label: 'Message', max: 10, step: 0.1, each: 1, initial: 0 },
    { flag: 'no-overlap-communication', label: 'Messages occupy both ranks', type: 'checkbox' },
    { flag: 'vocabulary-parallel', label: 'Output layer, spread over all ranks', kind: 'S', max: 30, step: 0.1, empty: 'off' },
  ] },
  { title: 'Memory', note: 'change by one microbatch, in M_B', closed: true, hint: UNIT, fields: [
    { flag: 'memory-f', label: 'Forward', kind: 'F', max: 2, step: 0.01, each: 0, empty: '1', initial: 1 },
    { flag: 'memory-b', label: 'Input gradient', kind: 'B', min: -2, max: 0, step: 0.01, each: 0, empty: '-0.5', initial: -0.5 },
    { flag: 'memory-w', label: 'Weight gradient', kind: 'W', min: -2, max: 0, step: 0.01, each: 0, empty: '-0.5', initial: -0.5 },
    { flag: 'memory-r', label: 'Recomputation', kind: 'R', max: 2, step: 0.01, each: 0, empty: '15/16 of F', needs: 'recompute' },
  ] },
];

export const OWN = [
  { flag: 'num-chunks', label: 'Chunks', type: 'number', min: 1, max: 8, empty: 'default' },
  { flag: 'placement', label: 'Placement', choices: [['', 'default'], ['linear', 'linear'], ['interleaved', 'interleaved'], ['v', 'V']] },
  { flag: 'memory-limit', label: 'Memory limit', unit: 'M_B', empty: 'default' },
  { flag: 'recompute', label: 'Recompute', choices: [['', 'nothing'], ['full', 'everything'], ['planned', 'where memory lacks']] },
  { flag: 'offload', label: 'Copy to the host', choices: [['', 'nothing'], ['auto', 'where memory lacks']] },
  { flag: 'microbatch-group-size', rare: true, label: 'Group size', type: 'number', min: 1, empty: 'default' },
  { flag: 'hardware-queues', rare: true, label: 'Hardware queues', choices: [['', 'no matter'], ['many', 'many'], ['1', 'one']] },
  { flag: 'post-validation', rare: true, label: 'Post-validation', type: 'checkbox' },
  { flag: 'lengths', rare: true, label: 'Lengths of microbatches', empty: 'alike' },
  { flag: 'steps', rare: true, label: 'Iterations', type: 'number', min: 1, max: 8, empty: '1' },
];

let count = 0;

/** One flag as a field: a text with a slider, and on demand one slider for each rank; or a choice, or a checkbox. */
export class Field {
  constructor(about, changed) {
    this.about = about;
    this.changed = (value) => changed(about.flag, value);
    const id = `field-${(count += 1)}`;
    this.message = h('p', { class: 'message', id: `${id}-message`, role: 'alert', hidden: true });
    this.input = this.#input(id);
    this.input.addEventListener(this.input.matches('select,[type=checkbox]') ? 'change' : 'input', () => this.#edited());
    const chip = about.kind && h('i', { class: 'chip', style: { '--colour': `var(--kind-${about.kind})`, '--ink': `var(--ink-${about.kind})` }, 'aria-hidden': 'true' }, about.kind);
    const label = h('label', { for: id }, chip, about.label);
    this.element = h('div', { class: `field ${about.type ?? ''}`, 'data-flag': about.flag }, label, this.input);
    if (about.unit) this.input.after(h('span', { class: 'unit', title: UNIT }, about.unit));
    if (about.max && !about.type && !about.choices) this.#addSliders();
    this.element.append(this.message);
  }

  #input(id) {
    const { choices, type, min, max, empty } = this.about;
    const common = { id, 'aria-describedby': `${id}-message` };
    if (choices) return h('select', common, choices.map(([value, text]) => h('option', { value }, text)));
    if (type === 'checkbox') return h('input', { ...common, type });
    return h('input', { ...common, type: type ?? 'text', inputmode: 'decimal', min, max, placeholder: empty, autocomplete: 'off', spellcheck: 'false' });
  }

  #addSliders() {
    const { label, min = 0, max, step = 1, each } = this.about;
    this.slider = h('input', { type: 'range', min, max, step, 'aria-label': `${label}, slider`, oninput: () => this.#set(this.slider.value) });
    this.sliders = h('div', { class: 'sliders', role: 'group', 'aria-label': `${label}, one slider for each rank`, hidden: true });
    this.element.append(this.slider);
    if (each === undefined) return;
    this.perRank = h('button', { type: 'button', class: 'per-rank', 'aria-pressed': 'false', title: 'One value for each rank', 'aria-label': `${label}: one value for each rank`, onclick: () => this.#toggle() });
    this.input.after(this.perRank);
    this.element.append(this.sliders);
  }

  #toggle() {
    const [first] = String(this.value || this.about.initial || 1).split(',');
    const isList = String(this.value).includes(',');
    this.#set(isList ? first : Array(Math.max(2, this.count)).fill(first).join(','));
  }

  #set(value) {
    this.input.value = value;
    this.#edited();
  }

  #edited() {
    const value = this.input.type === 'checkbox' ? this.input.checked : this.input.value.trim();
    this.show(value, this.ranks);
    this.changed(value);
  }

  /** Show a value; lists of values have an entry for each of `ranks`, or for each pair of neighbours. */
  show(value, ranks) {
    this.value = value ?? '';
    this.ranks = ranks;
    this.count = ranks - (this.about.each ?? 0);
    if (this.input.type === 'checkbox') this.input.checked = Boolean(value);
    else if (this.input !== document.activeElement || this.input.value.trim() !== String(this.value)) this.input.value = this.value;
    if (!this.slider) return;
    const numbers = String(this.value).split(',').map(Number);
    const isList = numbers.length > 1;
    this.slider.hidden = isList;
    this.#bound(this.slider, numbers[0]);
    this.slider.value = this.value === '' ? this.about.initial ?? this.slider.min : numbers[0];
    this.#shade(this.slider);
    if (!this.perRank) return;
    this.perRank.setAttribute('aria-pressed', String(isList));
    this.sliders.hidden = !isList || numbers.length > MOST_SLIDERS;
    if (!this.sliders.hidden) this.#showEach(numbers);
  }

  #showEach(numbers) {
    const { label, min = 0, max, step, each } = this.about;
    while (this.sliders.children.length > numbers.length) this.sliders.lastChild.remove();
    numbers.forEach((number, k) => {
      const name = each ? `between ranks ${k} and ${k + 1}` : `rank ${k}`;
      this.sliders.children[k] ?? this.sliders.append(h('input', {
        type: 'range', min, max, step, orient: 'vertical', 'aria-label': `${label}, ${name}`,
        oninput: (event) => {
          const all = String(this.value).split(',');
          all[k] = event.target.value;
          this.#set(all.join(','));
        },
      }));
      const slider = this.sliders.children[k];
      this.#bound(slider, Math.max(...numbers));
      slider.value = number;
      slider.title = `${name}: ${number}`;
      this.#shade(slider);
    });
  }

  /** Let a slider reach the value that was typed. */
  #bound(slider, number) {
    if (number > slider.max) slider.max = 2 * number;
    if (number < slider.min) slider.min = 2 * number;
  }

  #shade(slider) {
    slider.style.setProperty('--share', `${((slider.value - slider.min) / (slider.max - slider.min)) * 100}%`);
  }

  /** Say what is wrong beside the field; with no message, that nothing is. */
  fail(message) {
    this.message.hidden = !message;
    if (this.message.textContent !== (message ?? '')) this.message.textContent = message ?? '';
    if (message) this.input.setAttribute('aria-invalid', 'true');
    else this.input.removeAttribute('aria-invalid');
  }
}
