import { figure, h, percent, ticks } from './dom.js';
import { Stale } from './engine.js';
import { UNIT } from './fields.js';
import { words } from './state.js';

const [LEFT, RIGHT, TOP, BOTTOM, HEIGHT] = [52, 16, 14, 38, 250];
const LETTERS = 'ab';

/** The bubble of each planned schedule over its memory limit, which can be dragged. */
export class Plot {
  #known = new Map(); // command line without its limit -> limit -> point
  #round = 0;

  constructor(host, engine, ready, facts, changed) {
    Object.assign(this, { engine, ready, facts, changed });
    this.svg = h('svg', { height: HEIGHT, role: 'group', 'aria-label': 'Bubble over memory limit' });
    this.progress = h('small', { class: 'progress' });
    this.hint = h('p', { class: 'hint' });
    host.append(h('h2', {}, 'Bubble over memory limit, in M_B ', this.progress), this.svg, this.hint);
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  /** Plot the schedules of this state, as far as they are known. */
  show(state, pictures) {
    Object.assign(this, { state, pictures });
    this.ranks = Number(state.shared['pipeline-size']) || 2;
    this.svg.parentElement.hidden = state.panes.every(({ run }) => run);
    this.series = state.panes.map((pane, k) => {
      const entry = this.facts.schedules.find(({ name }) => name === pane.schedule);
      const isPlanned = Boolean(entry?.takesLimit && !entry.isSlow && !pane.input && !pane.run);
      const flags = isPlanned ? words(state, { ...pane, 'memory-limit': '' }, entry) : null;
      return { k, pane, isPlanned, flags, limits: this.facts.limits[pane.recompute ? 'recomputing' : 'keeping'] };
    });
    this.draw();
  }

  /** Compute what is not known yet, in the background. */
  async complete() {
    const round = this.#round += 1;
    await this.ready;
    if (round !== this.#round) return;
    const planned = this.series.filter(({ isPlanned }) => isPlanned);
    const missing = planned.flatMap(({ flags, limits }) => coarseFirst(limits).map((limit) => ({ flags, limit: limit * this.ranks })))
      .filter(({ flags, limit }) => !this.#points(flags).has(limit));
    for (const [done, { flags, limit }] of missing.entries()) {
      this.progress.textContent = `${missing.length - done} points to go`;
      try {
        this.#points(flags).set(limit, await this.engine.ask('plot', { what: 'point', words: flags, limit }, this.state.files));
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

  #points(flags) {
    const key = flags.join(' ');
    if (!this.#known.has(key)) this.#known.set(key, new Map());
    return this.#known.get(key);
  }

  draw() {
    const width = this.svg.clientWidth;
    if (!width || !this.series) return;
    const curves = this.series.map((one) => ({ ...one, points: one.isPlanned
      ? [...this.#points(one.flags).values()].filter(({ lost }) => lost !== undefined).sort((a, b) => a.limit - b.limit) : [] }));
    const drawn = this.pictures.map((picture) => picture?.figures);
    const most = 1.1 * Math.max(0.05, ...curves.flatMap(({ points }) => points.map(({ lost }) => lost)), ...drawn.map((figures) => figures?.lost ?? 0));
    const widest = Math.max(this.facts.limits.keeping.at(-1) * this.ranks, ...this.series.map(({ pane }) => limitOf(pane) ?? 0));
    this.x = (limit) => LEFT + (limit / widest) * (width - LEFT - RIGHT);
    this.y = (lost) => HEIGHT - BOTTOM - (lost / most) * (HEIGHT - TOP - BOTTOM);
    this.limitAt = (x) => ((x - LEFT) / (width - LEFT - RIGHT)) * widest;
    const focused = this.svg.contains(document.activeElement) ? document.activeElement.dataset.pane : null;
    this.svg.replaceChildren(...this.#axes(width, widest, most), ...curves.flatMap((curve) => this.#curve(curve)),
      ...this.series.flatMap((one) => this.#mark(one, drawn[one.k], widest)));
    if (focused) this.svg.querySelector(`.handle[data-pane="${focused}"]`)?.focus();
    this.hint.textContent = `${UNIT} ${this.series.some(({ isPlanned }) => isPlanned)
      ? 'Drag a handle, or press the arrow keys on it, to plan for another limit.'
      : 'Choose auto, zb-v, v-half or v-min to plan for a memory limit.'}`;
  }

  #axes(width, widest, most) {
    const bottom = HEIGHT - BOTTOM;
    const p = this.ranks;
    return [
      ...ticks(0, most, 4).flatMap((value) => [
        h('line', { class: 'grid', x1: LEFT, x2: width - RIGHT, y1: this.y(value), y2: this.y(value) }),
        h('text', { x: LEFT - 8, y: this.y(value) + 4, 'text-anchor': 'end' }, `${figure(100 * value)}%`)]),
      ...ticks(0, widest, width / 90).flatMap((limit) => [
        h('line', { class: 'grid', x1: this.x(limit), x2: this.x(limit), y1: bottom, y2: bottom + 4 }),
        h('text', { x: this.x(limit), y: bottom + 17, 'text-anchor': 'middle' }, figure(limit))]),
      h('line', { class: 'reference', x1: this.x(p), x2: this.x(p), y1: TOP, y2: bottom }),
      h('text', { x: this.x(p), y: HEIGHT - 4, 'text-anchor': 'middle' }, '1F1B’s memory'),
    ];
  }

  #curve({ k, points, pane }) {
    const letter = LETTERS[k];
    const line = points.map(({ limit, lost }) => `${this.x(limit)},${this.y(lost)}`).join(' ');
    return [
      h('polyline', { class: `curve ${letter}`, points: line }),
      ...points.map(({ limit, lost }) => h('circle', { class: `point ${letter}`, cx: this.x(limit), cy: this.y(lost), r: 3 },
        title(`${pane.schedule}: ${percent(lost)} under ${figure(limit)} M_B`))),
    ];
  }

  /** The handle of a limit that can be dragged; of other schedules, where they are. */
  #mark({ k, pane, isPlanned }, figures, widest) {
    if (!figures?.peak_memory || figures.lost === undefined) return [];
    const letter = LETTERS[k];
    const peak = Math.max(...figures.peak_memory);
    const y = this.y(figures.lost);
    const badge = (x) => [h('circle', { class: `mark ${letter}`, cx: x, cy: y, r: 11 }), h('text', { class: 'letter', x, y: y + 4, 'text-anchor': 'middle' }, letter.toUpperCase())];
    if (!isPlanned) return [h('g', {}, title(`${figures.schedule}: ${percent(figures.lost)} in ${figure(peak)} M_B`), badge(this.x(peak)))];
    const limit = limitOf(pane) ?? peak;
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

/** Every fourth limit, and then those between. */
const coarseFirst = (limits) => [limits.filter((_, k) => k % 4 === 0), limits.filter((_, k) => k % 4 === 2), limits.filter((_, k) => k % 2)].flat();

const limitOf = (pane) => {
  const values = String(pane['memory-limit'] ?? '').split(',').map(Number).filter((value) => value > 0);
  return values.length ? Math.max(...values) : null;
};

const title = (text) => {
  const element = document.createElementNS('http://www.w3.org/2000/svg', 'title');
  element.textContent = text;
  return element;
};
