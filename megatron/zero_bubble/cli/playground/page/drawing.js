import { $, figure, h } from './dom.js';
import { drawInputs, drawMemoryNumbers, drawMessages, drawPath, drawStill, LEFT, Scale } from './lanes.js';

/** The canvas of one schedule: it draws, and shows what is under the pointer or chosen with the keys. */
export class Drawing {
  #still = document.createElement('canvas');
  #drawn = '';
  #chosen = null;

  constructor(view) {
    this.view = view;
    this.canvas = h('canvas', { tabindex: 0, role: 'application', 'aria-roledescription': 'drawing of a schedule' });
    this.canvas.addEventListener('pointermove', (event) => this.#point(event));
    this.canvas.addEventListener('pointerdown', (event) => this.#grab(event));
    this.canvas.addEventListener('pointerleave', (event) => event.pointerType === 'mouse' && this.#choose(null));
    this.canvas.addEventListener('blur', () => this.#choose(null));
    this.canvas.addEventListener('wheel', (event) => this.#wheel(event), { passive: false });
    this.canvas.addEventListener('keydown', (event) => this.#key(event));
    new ResizeObserver(() => this.redraw()).observe(this.canvas);
  }

  show(picture, limit) {
    this.picture = picture;
    this.limit = limit;
    this.#chosen = null;
    const { figures, lanes } = picture;
    this.canvas.setAttribute('aria-label', `${picture.name} on ${lanes.length} ranks: `
      + `bubble rate ${(100 * figures.bubble_rate).toFixed(2)}%, ${figure(figures.makespan)} ${picture.unit}. `
      + 'Arrow keys go from operation to operation.');
    this.redraw();
  }

  /** Draw everything anew: the picture, the zoom, the size or the theme has changed. */
  redraw() {
    this.#drawn = '';
    this.frame();
  }

  /** Draw what moves over what does not, which is kept as an image. */
  frame() {
    const { picture, view, canvas } = this;
    const width = canvas.clientWidth;
    if (!picture || !width) return;
    const density = window.devicePixelRatio || 1;
    this.scale = new Scale(picture, width, view);
    const { scale } = this;
    canvas.style.height = `${scale.height}px`;
    const shown = this.#chosen ? this.#op.microbatch : null;
    const key = [width, scale.height, density, view.from, view.to, shown, view.showsPath].join();
    if (this.#drawn !== key) {
      this.#drawn = key;
      for (const each of [canvas, this.#still]) Object.assign(each, { width: width * density, height: scale.height * density });
      const still = this.#still.getContext('2d');
      still.setTransform(density, 0, 0, density, 0, 0);
      drawStill(still, picture, scale, view.ink, { shown, limit: this.limit });
      if (view.showsPath) this.#clipped(still, () => drawPath(still, picture, scale, view.ink));
    }
    this.#compose(canvas.getContext('2d'), density);
  }

  #compose(context, density) {
    const { picture, scale, view } = this;
    const { width, height } = this.#still;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, width, height);
    const cut = view.at === null ? width : Math.max(LEFT, Math.min(scale.x(view.at), scale.right)) * density;
    if (cut < width) {
      context.globalAlpha = 0.22;
      context.drawImage(this.#still, cut, 0, width - cut, height, cut, 0, width - cut, height);
      context.globalAlpha = 1;
    }
    if (cut > 0) context.drawImage(this.#still, 0, 0, cut, height, 0, 0, cut, height);
    context.setTransform(density, 0, 0, density, 0, 0);
    context.font = `11px ${view.ink.font}`;
    context.textBaseline = 'middle';
    drawMemoryNumbers(context, picture, scale, view.ink);
    this.#clipped(context, () => {
      if (this.#chosen) drawInputs(context, picture, scale, view.ink, ...this.#chosen);
      if (view.at !== null) {
        drawMessages(context, picture, scale, view.ink, view.at);
        context.fillStyle = view.ink.accent;
        context.fillRect(scale.x(view.at) - 1, 0, 2, scale.height);
      }
    });
  }

  #clipped(context, draw) {
    context.save();
    context.beginPath();
    context.rect(LEFT - 1, 0, this.scale.right - LEFT + 2, this.scale.height);
    context.clip();
    draw();
    context.restore();
  }

  get #op() {
    const [rank, position] = this.#chosen;
    return this.picture.lanes[rank][position];
  }

  /** [rank, position] of the operation at a place of the canvas. */
  #at(x, y) {
    const rank = this.scale.rankAt(y);
    if (rank === null || x < LEFT || x > this.scale.right) return null;
    const time = this.scale.time(x);
    const slack = this.scale.time(2) - this.scale.time(0); // operations that take no time are two pixels wide on each side
    const lane = this.picture.lanes[rank];
    const found = lane.findLastIndex(({ start, end }) => (start === end ? Math.abs(time - start) <= slack : start <= time && time < end));
    return found < 0 ? null : [rank, found];
  }

  /** The gap between operations at a place of the canvas, and what the rank waits for in it. */
  #idleAt(x, y) {
    const rank = this.scale.rankAt(y);
    if (rank === null || x < LEFT || x > this.scale.right) return null;
    const { lanes, kinds, begin, end } = this.picture;
    const time = this.scale.time(x);
    const next = lanes[rank].findIndex((op) => op.start > time);
    const from = lanes[rank].at(next < 0 ? -1 : next - 1);
    if (next < 0) return time < end ? { from: from.end, to: end, cause: 'tail' } : null;
    const { start, kind } = lanes[rank][next];
    return next ? { from: from.end, to: start, cause: kinds[kind].waiting } : { from: begin, to: start, cause: 'warmup' };
  }

  #point(event) {
    if (!this.picture || event.buttons) return;
    const place = this.#at(event.offsetX, event.offsetY);
    this.#choose(place, event);
    const idle = place ? null : this.#idleAt(event.offsetX, event.offsetY);
    if (idle) this.#tell([h('h3', {}, 'Idle', h('small', {}, idle.cause)), h('p', {}, `${figure(idle.to - idle.from)} ${this.picture.unit}`)], event.clientX, event.clientY);
  }

  #choose(place, event) {
    const hasChanged = String(place) !== String(this.#chosen);
    this.#chosen = place;
    if (hasChanged) this.frame();
    $('tip').hidden = true;
    if (!place) return;
    const box = this.canvas.getBoundingClientRect();
    const x = event?.clientX ?? box.left + this.scale.x(this.#op.end);
    this.#tell(this.#describe(), x, event?.clientY ?? box.top + this.scale.middle(place[0]));
  }

  /** Show words beside a place of the window. */
  #tell(words, x, y) {
    const tip = $('tip');
    tip.replaceChildren(...words);
    tip.hidden = false;
    tip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${y + 18 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 12 : y + 18}px`;
  }

  #describe() {
    const { picture } = this;
    const [rank, position] = this.#chosen;
    const op = this.#op;
    const { meaning, fills } = picture.kinds[op.kind];
    const before = picture.lanes[rank][position - 1];
    const waits = op.inputs.map(([from, at, arrival]) => ({
      words: `${picture.lanes[from][at].name} of ${from === rank ? 'this rank' : `rank ${from}`}`, time: arrival,
    }));
    if (before) waits.push({ words: `the rank, busy with ${before.name}`, time: before.end });
    waits.sort((one, other) => other.time - one.time);
    const stage = picture.stages[rank][op.chunk];
    const holds = picture.hasMemory ? [h('dt', {}, 'Rank holds'), h('dd', {}, `${figure(op.holds)} ${picture.memoryUnit}`)] : [];
    const swatch = h('i', { class: 'swatch', style: { '--colour': fills[op.chunk] } });
    return [
      h('h3', {}, swatch, op.name, h('small', {}, meaning.replace(/^\S+ /, ''))),
      h('dl', {},
        h('dt', {}, 'Where'), h('dd', {}, `rank ${rank}, stage ${stage}`),
        h('dt', {}, 'When'), h('dd', {}, `${figure(op.start)} to ${figure(op.end)} ${picture.unit}`),
        h('dt', {}, 'Takes'), h('dd', {}, `${figure(op.end - op.start)} ${picture.unit}`), ...holds),
      waits.length ? h('p', {}, 'Waits for') : h('p', {}, 'Waits for nothing'),
      h('ol', {}, waits.map(({ words, time }, k) => h('li', { class: k ? '' : 'last' }, h('span', {}, words), h('span', {}, figure(time))))),
    ];
  }

  /** Drag to move through time, click below the lanes to go there, tap an operation to choose it. */
  #grab(event) {
    if (!this.picture || event.button || event.offsetX < LEFT) return;
    const { view, scale } = this;
    const { offsetX: x, offsetY: y } = event;
    const begun = { x: event.clientX, from: view.from, to: view.to };
    let hasMoved = false;
    const move = ({ clientX }) => {
      hasMoved ||= Math.abs(clientX - begun.x) > 4;
      if (!hasMoved) return;
      this.#choose(null);
      view.show(begun.from - (clientX - begun.x) / (scale.right - LEFT) * (begun.to - begun.from), begun.to - begun.from);
    };
    const up = ({ type }) => {
      this.canvas.removeEventListener('pointermove', move);
      if (hasMoved || type !== 'pointerup') return;
      if (scale.rankAt(y) === null) view.seek(scale.time(x));
      else this.#choose(this.#at(x, y), event);
    };
    this.canvas.addEventListener('pointermove', move);
    this.canvas.addEventListener('pointerup', up, { once: true });
    this.canvas.addEventListener('pointercancel', up, { once: true });
  }

  #wheel(event) {
    if (!this.picture || !(event.ctrlKey || event.metaKey || event.shiftKey)) return;
    event.preventDefault();
    const { view, scale } = this;
    if (event.shiftKey) view.show(view.from + ((event.deltaX || event.deltaY) / scale.width) * (view.to - view.from), view.to - view.from);
    else view.zoom(2 ** (-event.deltaY / 200), scale.time(event.offsetX));
  }

  #key(event) {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (event.key === 'Escape') this.#choose(null);
    if (!moves[event.key] || !this.picture || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const { lanes } = this.picture;
    const [rank, position] = this.#chosen ?? [0, -1];
    const [down, right] = moves[event.key];
    const to = Math.max(0, Math.min(rank + down, lanes.length - 1));
    const start = this.#chosen ? this.#op.start : 0;
    const near = down ? Math.max(0, lanes[to].findLastIndex((op) => op.start <= start)) : position + right;
    this.#choose([to, Math.max(0, Math.min(near, lanes[to].length - 1))]);
    this.view.reveal(this.#op);
    $('spoken').textContent = $('tip').innerText.replaceAll('\n', ', ');
  }
}
