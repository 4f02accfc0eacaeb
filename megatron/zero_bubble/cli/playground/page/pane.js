import { copyText, figure, h, percent } from './dom.js';
import { Drawing } from './drawing.js';
import { Field, OWN, UNIT } from './fields.js';
import { applies, words } from './state.js';

const MOST_CURVES = 8; // ranks whose curves are all named

/** The card of one schedule: its fields, its figures, the drawing, and why its ranks idle. */
export class Pane {
  constructor(letter, facts, view, { changed, save, remove }) {
    this.facts = facts;
    const groups = [
      ['for any costs', facts.schedules.filter(({ usesCosts }) => !usesCosts)],
      ['planned from the costs', facts.schedules.filter(({ usesCosts }) => usesCosts)],
    ];
    this.select = h('select', { class: 'name', 'aria-label': `Schedule ${letter.toUpperCase()}`, 'aria-describedby': `message-${letter}`, onchange: () => changed('schedule', this.select.value) },
      groups.map(([label, entries]) => h('optgroup', { label }, entries.map(({ name, isSlow }) =>
        h('option', { value: name, disabled: isSlow }, isSlow ? `${name} (on the command line)` : name)))));
    this.given = h('strong', { class: 'name', hidden: true });
    this.discard = h('button', { type: 'button', class: 'icon', 'aria-label': 'Close the file', hidden: true, onclick: () => changed('input', undefined) }, '×');
    this.summary = h('p', { class: 'summary' });
    this.message = h('p', { class: 'message', id: `message-${letter}`, role: 'alert', hidden: true });
    this.fields = OWN.map((about) => new Field(about, changed));
    this.figures = h('dl', { class: 'figures' });
    this.draft = h('p', { class: 'drafted', role: 'status' }, 'first plan …');
    this.busy = h('p', { class: 'waiting', role: 'status' });
    this.drawing = new Drawing(view);
    this.curves = h('ul', { class: 'legend', 'aria-label': 'Curves of memory' });
    this.legend = h('ul', { class: 'legend', 'aria-label': 'Kinds of operations' });
    this.causes = h('div', { class: 'causes' });
    this.command = h('code');
    const saves = [['json', 'Schedule, for --zero-bubble-schedule (JSON)'], ['csv', 'Schedule, for PyTorch (CSV)'], ['svg', 'Picture (SVG)'], ['png', 'Picture (PNG)'], ['trace', 'Trace, for Perfetto (JSON)']];
    this.save = h('select', { class: 'save', 'aria-label': 'Save', onchange: () => { save(this.save.value); this.save.value = ''; } },
      h('option', { value: '' }, 'Save…'), saves.map(([value, text]) => h('option', { value }, text)));
    this.remove = h('button', { type: 'button', class: 'icon', 'aria-label': `Remove schedule ${letter.toUpperCase()}`, onclick: remove }, '×');
    const copied = h('button', { type: 'button', onclick: () => copyText(copied, 'Copy', this.command.textContent) }, 'Copy');
    this.more = h('button', { type: 'button', 'aria-expanded': 'false', onclick: () => this.#unfold(this.rare.hidden) }, 'More');
    this.rare = h('div', { class: 'rare', hidden: true },
      h('div', { class: 'own' }, this.fields.filter(({ about }) => about.rare).map(({ element }) => element)),
      h('p', { class: 'command' }, this.command, copied));
    this.element = h('section', { class: 'card pane', 'data-pane': letter, 'aria-label': `Schedule ${letter.toUpperCase()}` },
      h('header', {}, h('span', { class: 'letter', 'aria-hidden': 'true' }, letter.toUpperCase()), this.select, this.given, this.discard,
        h('div', { class: 'own' }, this.fields.filter(({ about }) => !about.rare).map(({ element }) => element)), h('span', { class: 'spacer' }), this.more, this.save, this.remove),
      this.rare,
      this.message, this.summary, this.busy, h('div', { class: 'facts' }, this.figures, this.draft, this.legend),
      h('div', { class: 'drawn' }, h('div', {}, this.drawing.canvas, this.curves), this.causes));
  }

  #unfold(isOpen) {
    this.rare.hidden = !isOpen;
    this.more.setAttribute('aria-expanded', String(isOpen));
  }

  show(state, pane) {
    const entry = this.facts.schedules.find(({ name }) => name === pane.schedule);
    const file = pane.run ?? pane.input;
    this.select.hidden = Boolean(file);
    this.given.hidden = !file;
    this.discard.hidden = !file;
    this.given.textContent = pane.run && pane.planned ? `${file}, as planned` : file ?? '';
    if (!file) this.select.value = pane.schedule;
    this.summary.textContent = file ? '' : entry?.summary ?? '';
    if (pane.run) this.summary.textContent = pane.planned ? 'The schedule of the run, with the times measured there and no other waiting.' : 'The iteration as it ran.';
    for (const field of this.fields) {
      field.show(pane[field.about.flag], Number(state.shared['pipeline-size']));
      field.element.hidden = !applies(field.about.flag, pane, entry);
    }
    if (this.fields.some(({ about }) => about.rare && pane[about.flag])) this.#unfold(true);
    if (pane.run) this.#unfold(false);
    this.more.hidden = Boolean(pane.run);
    this.save.hidden = Boolean(pane.run);
    this.remove.hidden = state.panes.length < 2 || Boolean(pane.run);
    this.command.textContent = `zero-bubble schedule simulate ${words(state, pane, entry).map(quoted).join(' ')}`;
  }

  /** Say what is wrong, beside the field that it is about; returns whether this pane has that field. */
  fail(flag, message) {
    const field = this.fields.find(({ about, element }) => about.flag === flag && !element.hidden);
    field?.fail(message);
    if (field?.about.rare) this.#unfold(true);
    return Boolean(field);
  }

  failSchedule(message) {
    this.message.hidden = false;
    this.message.textContent = message;
    this.select.setAttribute('aria-invalid', 'true');
  }

  clear() {
    this.message.hidden = true;
    this.select.removeAttribute('aria-invalid');
    for (const field of this.fields) field.fail();
    this.element.classList.remove('failed');
  }

  draw(picture, limit) {
    this.picture = picture;
    this.drawing.show(picture, limit);
    this.figures.replaceChildren(...figuresOf(picture).map(([label, value, title]) => h('div', { title }, h('dt', {}, label), h('dd', {}, value))));
    this.legend.replaceChildren(...Object.values(picture.kinds).map(({ meaning, fills }) => h('li', {},
      fills.map((fill) => h('i', { class: 'swatch', style: { '--colour': fill === '#000000' ? 'var(--strong)' : fill } })), meaning)),
    ...(picture.stages[0].length > 1 ? [h('li', {}, 'darker: later chunks')] : []));
    this.curves.replaceChildren(...(picture.hasMemory ? curvesOf(picture) : []));
  }

  /** Say what the reader waits for; the words are shown while the pane is busy. */
  wait(words) {
    this.busy.textContent = words;
  }

  /** Show why ranks idle; `most` is the idle time that fills a bar, the same for both schedules. */
  explain(most) {
    const isOpen = this.causes.querySelector('details')?.open;
    this.causes.replaceChildren(...causesOf(this.picture, this.facts.causes, most));
    this.causes.querySelector('details').open = isOpen ?? false;
  }
}

const quoted = (word) => (/^[\w=.,:/-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);

/** [label, value, explanation] of every figure in the header. */
function figuresOf({ figures, unit, memoryUnit }) {
  const rows = [['Bubble', percent(figures.bubble_rate), 'Share of the longest span that is not the work of its busiest rank']];
  if (figures.imbalance > 1e-9) rows.push(['Imbalance', percent(figures.imbalance), 'Share of all ranks’ time lost because some have less work than the busiest']);
  if (figures.recomputed) rows.push(['Bubble and R', percent(figures.lost), 'Share of the longest span that is not F, B and W']);
  if (figures.speed_up) rows.push(['Speed', `${figures.speed_up.toFixed(3)}× 1F1B`, 'Cost of 1F1B with the same work a rank, over the cost of this schedule']);
  rows.push(['Iteration', `${figure(figures.iteration_time ?? figures.makespan)} ${unit}`, 'Time from one iteration to the next']);
  if (figures.peak_memory) rows.push(['Peak memory', `${figure(Math.max(...figures.peak_memory))} ${memoryUnit}`, `Of the rank that holds most. ${memoryUnit === 'M_B' ? UNIT : ''}`]);
  if (figures.num_messages !== undefined) rows.push(['Messages', figure(figures.num_messages), 'Tensors that cross ranks in one iteration']);
  return rows;
}

/** The colours of the ranks' curves; of many ranks those of the first and the last, between which the others are. */
function curvesOf({ rankColours, lanes, memoryUnit }) {
  const ranks = lanes.map((_, rank) => rank).filter((rank) => lanes.length <= MOST_CURVES || rank === 0 || rank === lanes.length - 1);
  const entries = ranks.map((rank) => h('li', {}, h('i', { class: 'swatch line', style: { '--colour': rankColours[rank] } }), `rank ${rank}`));
  return memoryUnit === 'M_B' ? [...entries, h('li', {}, UNIT)] : entries;
}

/** The idle time of every rank. */
export const idleTimes = ({ causes, lanes }) => lanes.map((_, rank) => Object.values(causes).reduce((sum, times) => sum + times[rank], 0));

/** Bars of the causes of idle time, one a rank, and the same as a table. */
function causesOf(picture, colours, most) {
  const { causes, lanes, figures, unit } = picture;
  const words = Object.keys(causes).filter((word) => causes[word].some((time) => time > 1e-9));
  const swatch = (word) => h('i', { class: 'swatch', style: { '--colour': colours[word] } });
  const bars = idleTimes(picture).map((total, rank) => {
    const here = words.filter((word) => causes[word][rank] > 1e-9);
    const segments = here.map((word) => h('i', { style: { '--colour': colours[word], '--share': causes[word][rank] / most } }));
    const title = here.map((word) => `${word} ${figure(causes[word][rank])} ${unit}`).join('\n');
    return h('div', { class: 'cause', title }, h('span', {}, `rank ${rank}`), h('span', { class: 'bar' }, segments), h('span', {}, percent(total / figures.makespan)));
  });
  const head = (text) => h('th', { scope: 'col' }, text);
  const rows = lanes.map((_, rank) => h('tr', {}, h('th', { scope: 'row' }, rank), Object.values(causes).map((times) => h('td', {}, figure(times[rank])))));
  const table = h('table', {}, h('caption', {}, `Idle time of each rank, in ${unit}`),
    h('thead', {}, h('tr', {}, head('rank'), Object.keys(causes).map(head))), h('tbody', {}, rows));
  return [
    h('h3', {}, 'Idle time by cause'), h('div', {}, bars),
    h('ul', { class: 'legend' }, words.map((word) => h('li', {}, swatch(word), word))),
    h('p', { class: 'hint' }, 'Share of the whole iteration, from the first operation of any rank to the last of any. The bubble above counts from a rank’s own first operation to its own last.'),
    h('details', {}, h('summary', {}, 'As numbers'), h('div', { class: 'scroll' }, table)),
  ];
}
