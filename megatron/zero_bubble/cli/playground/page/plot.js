import { figure, h, percent, ticks } from './dom.js';
import { Stale } from './engine.js';
import { UNIT } from './fields.js';
import { limitOf, words } from './state.js';

const [LEFT, RIGHT, TOP, BOTTOM, HEIGHT] = [52, 16, 14, 38, 250];
const LETTERS = 'ab';

const WAYS = { keep: 'keep everything', drop: 'recompute', offload: 'copy to the host', both: 'both' };

/** The bubble of each planned schedule over its memory limit, which can be dragged; or, as a dial, the time of the first
 * of them over its time with enough memory, by what it may do with activations. */
export class Plot {
  #known = new Map(); // command line without its limit, text of its costs -> limit -> point
  #round = 0;

  constructor(host, engine, ready, facts, changed) {
    Object.assign(this, { engine, ready, facts, changed });
    this.svg = h('svg', { height: HEIGHT, role: 'group', 'aria-label': 'Bubble over memory limit' });
    this.progress = h('small', { class: 'progress' });
    this.hint = h('p', { class: 'hint' });
    this.heading = h('span');
    this.dial = h('input', { type: 'checkbox', onchange: () => { this.show(this.state, this.pictures); this.complete(); } });
    this.legend = h('ul', { class: 'legend', 'aria-label': 'Curves' });
    host.append(h('h2', {}, this.heading, ' ', this.progress), h('label', { class: 'dial' }, this.dial, 'Time, by what may leave the device'),
      this.svg, this.legend, this.hint);
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  /** Plot the schedules of this state, as far as they are known. */
  show(state, pictures) {
    Object.assign(this, { state, pictures });
    this.ranks = Math.max(2, Number(state.shared['pipeline-size']) || 2);
    this.svg.parentElement.hidden = state.panes.every(({ run }) => run);
    const panes = state.panes.map((pane, k) => this.#series(pane, k));
    const first = panes.find(({ isPlanned }) => isPlanned);
    this.dial.disabled = !first;
    const ways = first && this.dial.checked ? Object.entries(this.facts.ways) : null;
    this.series = ways?.map(([way, flags]) => ({ ...this.#series({ ...first.pane, recompute: '', offload: '', ...flags }, first.k), way })) ?? panes;
    this.heading.textContent = ways ? `Time of ${first.pane.schedule} over memory limit, in M_B` : 'Bubble over memory limit, in M_B';
    this.svg.setAttribute('aria-label', this.heading.textContent);
    this.legend.replaceChildren(...(ways ?? []).map(([way]) => h('li', { class: way }, h('i'), WAYS[way])));
    this.draw();
  }

  /** A curve of a pane's schedule. */
  #series(pane, k) {
    const entry = this.facts.schedules.find(({ name }) => name === pane.schedule);
    const isPlanned = Boolean(entry?.takesLimit && !entry.isSlow && !pane.input && !pane.run);
    const flags = isPlanned ? words(this.state, { ...pane, 'memory-limit': '' }, entry) : null;
    return { k, pane, isPlanned, flags, limit: limitOf(pane, entry), limits: this.facts.limits[pane.recompute || pane.offload ? 'recomputing' : 'keeping'] };
  }

  /** Compute what is not known yet, in the background. */
  async complete() {
    const round = this.#round += 1;
    await this.ready;
    if (round !== this.#round) return;
    const planned = this.series.filter(({ isPlanned }) => isPlanned);
    const missing = FINENESS.flatMap((isOf) => planned.flatMap((one) => one.limits.filter((_, k) => isOf(k)).map((limit) => ({ ...one, limit: limit * this.ranks }))))
      .filter(({ flags, way, limit }) => !this.#points(flags, way).has(limit));
    for (const [done, { flags, way, limit }] of missing.entries()) {
      this.progress.textContent = `${missing.length - done} points to go`;
      try {
        this.#points(flags, way).set(limit, await this.engine.ask('plot', { what: 'point', words: flags, limit, of_dial: Boolean(way) }, this.state.files));
      } catch (error) {
        if (!(error instanceof Stale)) this.progress.textContent = error.message;
        return;
      }
      if (round !== this.#round) return;
      this.draw();
    }
    this.progress.textContent = '';
  }

  /** Add points that were computed elsewhere. */
  know(flags, points) {
    for (const point of points) this.#points(flags).set(point.limit, point);
  }

  #points(flags, way = '') {
    const key = [...flags, way, this.state?.files[this.state.shared.costs]].join(' ');
    if (!this.#known.has(key)) this.#known.set(key, new Map());
    return this.#known.get(key);
  }

  draw() {
    const width = this.svg.clientWidth;
    if (!width || !this.series) return;
    const isDial = this.series.some(({ way }) => way);
    const known = this.series.map((one) => ({ ...one, points: one.isPlanned
      ? [...this.#points(one.flags, one.way).values()].filter(({ lost }) => lost !== undefined).sort((a, b) => a.limit - b.limit) : [] }));
    const shortest = Math.min(...known.flatMap(({ points }) => points.map(({ time }) => time)));
    const curves = known.map((one) => ({ ...one, points: one.points.map((point) => ({ ...point, value: isDial ? point.time / shortest - 1 : point.lost })) }));
    const drawn = this.pictures.map((picture) => picture?.figures);
    const most = Math.min(isDial ? 1 : Infinity, 1.1 * Math.max(0.05, ...curves.flatMap(({ points }) => points.map(({ value }) => value)), ...drawn.map((figures) => (isDial ? 0 : figures?.lost ?? 0))));
    const peaks = drawn.map((figures) => (figures?.lost === undefined ? 0 : Math.max(...figures.peak_memory)));
    const widest = Math.max(this.facts.limits.keeping.at(-1) * this.ranks, ...this.series.map(({ limit }) => limit ?? 0), ...peaks);
    this.x = (limit) => LEFT + (limit / widest) * (width - LEFT - RIGHT);
    this.y = (value) => HEIGHT - BOTTOM - (Math.min(value, most) / most) * (HEIGHT - TOP - BOTTOM);
    this.limitAt = (x) => ((x - LEFT) / (width - LEFT - RIGHT)) * widest;
    const focused = this.svg.contains(document.activeElement) ? document.activeElement.dataset.pane : null;
    this.svg.replaceChildren(...this.#axes(width, widest, most, isDial), ...curves.flatMap((curve) => this.#curve(curve)),
      ...(isDial ? [] : this.series.flatMap((one) => this.#mark(one, drawn[one.k], widest))));
    if (focused) this.svg.querySelector(`.handle[data-pane="${focused}"]`)?.focus();
    if (isDial) this.hint.textContent = `${UNIT} 1 is the shortest of these times. Set the time of a copy among the times on the left.`;
    else this.hint.textContent = `${UNIT} ${this.series.some(({ isPlanned }) => isPlanned)
      ? 'Drag a handle, or press the arrow keys on it, to plan for another limit.'
      : 'Choose auto, zb-v, v-half or v-min to plan for a memory limit.'}`;
  }

  #axes(width, widest, most, isDial) {
    const bottom = HEIGHT - BOTTOM;
    const p = this.ranks;
    return [
      ...ticks(0, most, 4).flatMap((value) => [
        h('line', { class: 'grid', x1: LEFT, x2: width - RIGHT, y1: this.y(value), y2: this.y(value) }),
        h('text', { x: LEFT - 8, y: this.y(value) + 4, 'text-anchor': 'end' }, isDial ? (1 + value).toFixed(2) : `${figure(100 * value)}%`)]),
      ...ticks(0, widest, width / 90).flatMap((limit) => [
        h('line', { class: 'grid', x1: this.x(limit), x2: this.x(limit), y1: bottom, y2: bottom + 4 }),
        h('text', { x: this.x(limit), y: bottom + 17, 'text-anchor': 'middle' }, figure(limit))]),
      h('line', { class: 'reference', x1: this.x(p), x2: this.x(p), y1: TOP, y2: bottom }),
      h('text', { x: this.x(p), y: HEIGHT - 4, 'text-anchor': 'middle' }, '1F1B’s memory'),
    ];
  }

  #curve({ k, points, pane, way }) {
    const letter = way ?? LETTERS[k];
    const line = points.map(({ limit, value }) => `${this.x(limit)},${this.y(value)}`).join(' ');
    return [
      h('polyline', { class: `curve ${letter}`, points: line }),
      ...points.map(({ limit, value }) => h('circle', { class: `point ${letter}`, cx: this.x(limit), cy: this.y(value), r: 3 },
        title(way ? `${WAYS[way]}: ${(1 + value).toFixed(3)} times as long under ${figure(limit)} M_B` : `${pane.schedule}: ${percent(value)} under ${figure(limit)} M_B`))),
    ];
  }

  /** The handle of a limit that can be dragged; of other schedules, where they are. */
  #mark({ k, limit: given, isPlanned }, figures, widest) {
    if (!figures?.peak_memory || figures.lost === undefined) return [];
    const letter = LETTERS[k];
    const peak = Math.max(...figures.peak_memory);
    const y = this.y(figures.lost);
    const badge = (x) => [h('circle', { class: `mark ${letter}`, cx: x, cy: y, r: 11 }), h('text', { class: 'letter', x, y: y + 4, 'text-anchor': 'middle' }, letter.toUpperCase())];
    if (!isPlanned) return [h('g', {}, title(`${figures.schedule}: ${percent(figures.lost)} in ${figure(peak)} M_B`), badge(this.x(peak)))];
    const limit = given ?? peak;
    const x = this.x(limit);
    const set = (value) => this.changed(k, String(Math.max(0.25, Math.min(widest, Math.round(value * 4) / 4))));
    const steps = { ArrowLeft: -0.25, ArrowDown: -0.25, ArrowRight: 0.25, ArrowUp: 0.25, PageDown: -1, PageUp: 1 };
    return [h('g', {
      class: `handle ${letter}`, tabindex: 0, role: 'slider', 'data-pane': letter, 'aria-label': `Memory limit of schedule ${letter.toUpperCase()}`,
      'aria-valuemin': 0.25, 'aria-valuemax': widest, 'aria-valuenow': limit, 'aria-valuetext': `${figure(limit)} M_B, bubble ${percent(figures.lost)}`,
      onkeydown: (event) => {
        if (!steps[event.key]) return;
        event.preventDefault();
        set(limit + steps[event.key]);
      },
      onpointerdown: (event) => {
        event.preventDefault();
        event.currentTarget.focus();
        const move = ({ clientX }) => set(this.limitAt(clientX - this.svg.getBoundingClientRect().left));
        addEventListener('pointermove', move);
        for (const end of ['pointerup', 'pointercancel']) addEventListener(end, () => removeEventListener('pointermove', move), { once: true });
      },
    }, h('line', { x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }), h('rect', { class: 'grip', x: x - 14, y: TOP, width: 28, height: HEIGHT - TOP - BOTTOM }), badge(x))];
  }
}

/** Of all curves every fourth limit is computed first, and then those between. */
const FINENESS = [(k) => k % 4 === 0, (k) => k % 4 === 2, (k) => k % 2 === 1];

const title = (text) => {
  const element = document.createElementNS('http://www.w3.org/2000/svg', 'title');
  element.textContent = text;
  return element;
};
