import { $, figure, h } from './dom.js';

const SECONDS = 12; // a whole schedule plays in these, at speed 1

/** What both drawings share: the part of time that they show, the playhead, and the colours of the theme. */
export class View {
  from = 0;
  to = 1;
  at = null;
  showsPath = true;
  #begin = 0;
  #end = 1;
  #speed = 1;
  #last = null;

  constructor(changed, moved) {
    this.changed = changed;
    this.moved = moved;
    this.#build($('transport'));
    this.readTheme();
  }

  #build(host) {
    this.play = h('button', { type: 'button', class: 'play', 'aria-label': 'Play', onclick: () => this.toggle() });
    this.scrubber = h('input', { type: 'range', min: 0, max: 1000, value: 1000, step: 1, 'aria-label': 'Time', oninput: () => {
      this.#stop();
      this.seek(this.#begin + (this.scrubber.value / 1000) * (this.#end - this.#begin));
    } });
    this.clock = h('output', { 'aria-label': 'Playhead' });
    const speed = h('select', { 'aria-label': 'Speed', onchange: () => { this.#speed = Number(speed.value); } },
      [0.25, 0.5, 1, 2, 4].map((factor) => h('option', { value: factor, selected: factor === 1 }, `${factor}×`)));
    const zoom = (label, text, action) => h('button', { type: 'button', class: 'icon', 'aria-label': label, title: label, onclick: action }, text);
    this.path = h('input', { type: 'checkbox', checked: true, onchange: () => {
      this.showsPath = this.path.checked;
      this.changed();
    } });
    host.append(this.play, this.scrubber, this.clock, speed,
      h('span', { class: 'zoom' }, zoom('Zoom out', '−', () => this.zoom(1 / 1.5)), zoom('Zoom in', '+', () => this.zoom(1.5)), zoom('Show all', '⤢', () => this.fit())),
      h('label', { class: 'check' }, this.path, 'Critical path'));
  }

  /** Show pictures that begin and end at these times. The zoom stays, unless all was shown. */
  cover(begin, end) {
    const isFitted = this.from === this.#begin && this.to === this.#end;
    [this.#begin, this.#end] = [begin, end > begin ? end : begin + 1];
    if (this.at !== null) this.at = Math.min(this.at, this.#end);
    if (isFitted || this.from >= this.#end) [this.from, this.to] = [this.#begin, this.#end];
    this.to = Math.min(this.to, this.#end);
    this.#tell();
    this.changed();
  }

  fit() { this.show(this.#begin, this.#end - this.#begin); }

  /** Show so much time from this time on. */
  show(from, length) {
    const all = this.#end - this.#begin;
    const kept = Math.min(all, Math.max(all / 200, length));
    this.from = Math.min(Math.max(from, this.#begin), this.#end - kept);
    this.to = kept === all ? this.#end : this.from + kept;
    this.changed();
  }

  /** Enlarge by a factor around a time. */
  zoom(factor, around = this.at ?? (this.from + this.to) / 2) {
    const share = Math.min(1, Math.max(0, (around - this.from) / (this.to - this.from)));
    const length = (this.to - this.from) / factor;
    this.show(around - share * length, length);
  }

  /** Move until an operation can be seen. */
  reveal({ start, end }) {
    if (start < this.from || end > this.to) this.show((start + end - (this.to - this.from)) / 2, this.to - this.from);
  }

  /** Put the playhead at a time; at the end of all it vanishes. */
  seek(time) {
    this.at = time >= this.#end ? null : Math.max(this.#begin, time);
    if (this.at !== null && (this.at < this.from || this.at > this.to)) this.show(this.at, this.to - this.from);
    this.#tell();
    this.moved();
  }

  toggle() {
    if (this.#last !== null) return this.#stop();
    if (this.at === null) this.seek(this.#begin);
    this.#last = performance.now();
    this.play.classList.add('playing');
    this.play.setAttribute('aria-label', 'Pause');
    return requestAnimationFrame((now) => this.#step(now));
  }

  toStart() { this.seek(this.#begin); }
  toEnd() { this.#stop(); this.seek(this.#end); }

  #stop() {
    this.#last = null;
    this.play.classList.remove('playing');
    this.play.setAttribute('aria-label', 'Play');
  }

  #step(now) {
    if (this.#last === null) return;
    const passed = Math.min(now - this.#last, 100) / 1000;
    this.#last = now;
    this.seek(this.at + (passed * this.#speed * (this.#end - this.#begin)) / SECONDS);
    if (this.at === null) this.#stop();
    else requestAnimationFrame((next) => this.#step(next));
  }

  #tell() {
    const at = this.at ?? this.#end;
    this.scrubber.value = ((at - this.#begin) / (this.#end - this.#begin)) * 1000;
    this.scrubber.style.setProperty('--share', `${this.scrubber.value / 10}%`);
    this.scrubber.setAttribute('aria-valuetext', figure(at));
    this.clock.textContent = figure(at);
  }

  readTheme() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(`--${name}`).trim();
    this.ink = Object.fromEntries(['muted', 'strong', 'line', 'lane', 'panel', 'accent', 'font'].map((name) => [name, read(name)]));
    this.ink.causes = this.causes ?? {};
  }
}
