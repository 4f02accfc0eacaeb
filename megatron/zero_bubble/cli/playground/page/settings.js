import { h } from './dom.js';
import { Field, SHARED } from './fields.js';

const NARROW = matchMedia('(width < 860px)');

/** The fields that both schedules share, and the file of costs that takes the place of most. */
export class Settings {
  constructor(host, changed) {
    this.fields = new Map();
    this.file = h('p', { class: 'file', hidden: true });
    this.ofRun = h('p', { class: 'hint', hidden: true }, 'A run has sizes and times of its own. Close its file to set others.');
    this.changed = changed;
    const groups = SHARED.map(({ title, note, closed, hint, fields }) => h('details', { class: 'card group', open: !closed && !NARROW.matches },
      h('summary', {}, title, note && h('small', {}, note)), hint && h('p', { class: 'hint' }, hint),
      fields.map((about) => {
        const field = new Field(about, changed);
        this.fields.set(about.flag, field);
        return field.element;
      })));
    host.append(this.ofRun, groups[0], this.file, ...groups.slice(1));
  }

  show(state) {
    const { costs, ...shared } = state.shared;
    const ranks = Number(shared['pipeline-size']) || 2;
    const recomputes = state.panes.some((pane) => pane.recompute);
    const isGiven = state.panes.every((pane) => pane.input || pane.run);
    const isRun = state.panes.every((pane) => pane.run);
    this.ofRun.hidden = !isRun;
    this.file.hidden = !costs || isRun;
    this.file.replaceChildren('Costs from ', h('strong', {}, costs ?? ''), h('button', {
      type: 'button', class: 'icon', 'aria-label': 'Remove the file of costs', onclick: () => this.changed('costs', undefined),
    }, '×'));
    for (const [flag, field] of this.fields) {
      const isSize = flag === 'pipeline-size' || flag === 'num-microbatches';
      field.show(shared[flag], ranks);
      field.element.hidden = (field.about.needs === 'recompute' && !recomputes)
        || (isSize && isGiven) || isRun || (Boolean(costs) && !isSize && flag !== 'no-overlap-communication');
    }
    for (const group of new Set([...this.fields.values()].map(({ element }) => element.closest('details')))) {
      group.hidden = ![...group.querySelectorAll('.field')].some((element) => !element.hidden);
    }
  }

  /** Show a message beside the field of a flag; returns whether there is one. */
  fail(flag, message) {
    const field = this.fields.get(flag);
    if (!field) return false;
    field.fail(message);
    field.element.closest('details').open = true;
    return true;
  }

  clear() {
    for (const field of this.fields.values()) field.fail();
  }
}
