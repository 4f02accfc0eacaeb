import { $, copyText, greatest, h, least } from './dom.js';
import { Engine, Stale } from './engine.js';
import { EXAMPLES } from './examples.js';
import { OWN, SHARED } from './fields.js';
import { receiveFiles, saveAs } from './files.js';
import { idleTimes, Pane } from './pane.js';
import { Plot } from './plot.js';
import { Settings } from './settings.js';
import { copy, fromFragment, limitOf, Lists, toFragment, words } from './state.js';
import { View } from './view.js';

const DELAY = 300; // milliseconds without a change after which the address and the plot follow
const PAUSE = 100; // milliseconds without a change after which a draft is planned whole
const [SLOW, USUAL] = [200, 1.5]; // milliseconds: of planning above which a draft is drawn first; for each F, if not known
const LETTERS = 'ab';

const { facts, state: start, pictures: first, points } = await (await fetch('start.json')).json();
const [engine, background] = [new Engine(), new Engine()];
let drew;
// Python starts twice: in the background when something is drawn, which waits for the first.
let hasPython = false;
const loaded = engine.warm().then(() => { hasPython = true; });
const ready = Promise.all([loaded, new Promise((resolve) => { drew = resolve; })]);
const times = new Map(); // schedule -> milliseconds that planning it took, for each F
const entryOf = (pane) => facts.schedules.find(({ name }) => name === pane.schedule);
const startState = () => ({ ...copy(start), files: {} });
const KNOWN = new Set(['costs', ...SHARED.flatMap(({ fields }) => fields.map(({ flag }) => flag))]);
const KNOWN_OF_PANE = new Set(['schedule', 'input', 'run', 'planned', ...OWN.map(({ flag }) => flag)]);
let state = await stateOf(location.hash.slice(1));
let pictures = [];
let rounds = [0, 0]; // of each pane, how often its picture was asked for
let errors = [];
let panes = [];
let settling;

const lists = new Lists();
const view = new View(() => panes.forEach(({ drawing }) => drawing.redraw()), () => panes.forEach(({ drawing }) => drawing.frame()));
view.causes = facts.causes;
view.readTheme();
const settings = new Settings($('settings'), changeShared);
const plot = new Plot($('plot'), background, ready, facts, (k, limit) => changePane(k, 'memory-limit', limit));
start.panes.forEach((pane, k) => plot.know(words(start, { ...pane, 'memory-limit': '' }, entryOf(pane)), points[k]));
for (const [kind, { fill, isDark }] of Object.entries(facts.colours)) {
  document.documentElement.style.setProperty(`--kind-${kind}`, fill);
  document.documentElement.style.setProperty(`--ink-${kind}`, isDark ? '#fefefe' : '#111');
}

function changeShared(flag, value) {
  state.shared[flag] = value;
  lists.forget(flag);
  const ranks = Number(value);
  if (flag === 'pipeline-size' && ranks >= 2 && ranks <= 64) resizeLists(ranks);
  update();
}

/** Fit all lists with a value for each rank to a number of ranks. */
function resizeLists(ranks) {
  const { shared } = state;
  for (const name of Object.keys(shared)) shared[name] = lists.resized(name, shared[name], name === 'time-comm' ? ranks - 1 : ranks);
  state.panes.forEach((pane, k) => { pane['memory-limit'] = lists.resized(`${k}.memory-limit`, pane['memory-limit'], ranks); });
}

function changePane(k, flag, value) {
  if (flag === 'input') state.panes[k] = { schedule: start.panes[k].schedule };
  else state.panes[k][flag] = value;
  lists.forget(`${k}.${flag}`);
  if (flag === 'schedule') for (const name of ['num-chunks', 'placement', 'microbatch-group-size']) delete state.panes[k][name];
  update([k]);
}

/** Show the state, and ask Python for the pictures of these panes; all, if none are named. */
function update(changed = state.panes.map((_, k) => k)) {
  const isOther = panes.length !== state.panes.length;
  if (isOther) rebuild();
  settings.show(state);
  state.panes.forEach((pane, k) => panes[k].show(state, pane));
  (isOther ? state.panes.map((_, k) => k) : changed).forEach(ask);
  settle();
}

function rebuild() {
  panes = state.panes.map((_, k) => new Pane(LETTERS[k], facts, view, {
    changed: (flag, value) => changePane(k, flag, value),
    save: (kind) => save(k, kind),
    remove: () => { state.panes.splice(k, 1); panes = []; update(); },
  }));
  for (let k = panes.length; k < rounds.length; k += 1) { // nobody waits for the picture of a pane that was removed
    rounds[k] += 1;
    engine.forget(`picture ${k}`);
  }
  pictures = pictures.slice(0, panes.length);
  errors = [];
  const add = h('button', { type: 'button', class: 'add', onclick: () => { state.panes.push({ schedule: 'zb-v' }); update(); } }, 'Compare with another schedule');
  $('panes').replaceChildren(...panes.map(({ element }) => element), ...(panes.length < 2 ? [add] : []));
}

const flagsOf = (pane) => words(state, pane, entryOf(pane));

async function ask(k) {
  const pane = state.panes[k];
  const question = pane.run ? { what: 'run', file: pane.run, planned: Boolean(pane.planned) } : { what: 'picture', words: flagsOf(pane) };
  const round = rounds[k] += 1;
  if (isStart()) {
    engine.forget(`picture ${k}`);
    return receive(k, async () => first[k]);
  }
  if (!isSlow(pane)) return receive(k, () => engine.ask(`picture ${k}`, question, state.files));
  const isDrawn = await receive(k, () => engine.ask(`picture ${k}`, { ...question, is_draft: true }, state.files), true);
  await new Promise((resolve) => { setTimeout(resolve, PAUSE); });
  if (isDrawn && round === rounds[k]) await receive(k, () => engine.ask(`picture ${k}`, question, state.files));
}

/** Draw the answer, or show what is wrong; returns whether it is drawn. A draft is drawn until the whole plan is there. */
async function receive(k, answering, isDraft = false) {
  const { element } = panes[k];
  const busy = setTimeout(() => {
    panes[k]?.wait(waitsFor());
    element.classList.add('busy');
  }, 250);
  try {
    const answer = await answering();
    errors[k] = answer.error ? answer : null;
    element.classList.toggle('draft', isDraft && !answer.error);
    if (!answer.error) draw(k, answer, isDraft);
  } catch (error) {
    if (error instanceof Stale) return false;
    errors[k] = { error: error.message, flag: 'schedule' };
  } finally {
    clearTimeout(busy);
  }
  element.classList.remove('busy');
  showErrors();
  drew();
  return !errors[k];
}

/** What a reader waits for who sees no drawing yet. */
const waitsFor = () => (hasPython ? 'Planning and drawing; with many ranks and microbatches this takes a while.' : 'Loading Python.');

/** Whether planning takes so long that a draft is worth drawing. */
function isSlow(pane) {
  const { 'pipeline-size': ranks, 'num-microbatches': microbatches } = state.shared;
  const isPlanned = !pane.run && !pane.input && entryOf(pane)?.usesCosts;
  return isPlanned && (times.get(pane.schedule) ?? USUAL) * ranks * microbatches > SLOW;
}

/** Whether the page shows what it begins with, whose pictures came with it. */
const isStart = () => JSON.stringify([state.shared, state.panes]) === JSON.stringify([start.shared, start.panes]);

/** Say what is wrong beside the fields: once, if it is so with both schedules. */
function showErrors() {
  settings.clear();
  panes.forEach((pane, k) => {
    pane.clear();
    if (!errors[k]) return;
    const { flag, error } = errors[k];
    pane.element.classList.add('failed');
    if (!pane.fail(flag, error) && !settings.fail(flag, error)) pane.failSchedule(error);
  });
}

function draw(k, picture, isDraft) {
  pictures[k] = prepared(picture);
  const { schedule, generation_seconds: seconds } = picture.figures;
  const { 'pipeline-size': ranks, 'num-microbatches': microbatches } = state.shared;
  if (seconds && !isDraft && !isStart()) times.set(schedule, (1000 * seconds) / (ranks * microbatches));
  panes[k].draw(pictures[k], limitOf(state.panes[k], entryOf(state.panes[k])));
  const shown = pictures.filter(Boolean);
  const most = Math.max(...shown.flatMap(idleTimes)) || 1;
  panes.filter(({ picture: known }) => known).forEach((each) => each.explain(most));
  view.cover(Math.min(...shown.map(({ begin }) => begin)), Math.max(...shown.map(({ end }) => end)));
  const { dataset } = document.documentElement;
  dataset.shown = Number(dataset.shown ?? 0) + 1;
  if (!isDraft) dataset.drawn = Number(dataset.drawn ?? 0) + 1;
  settle();
}

/** Add to a picture what follows from it: when it begins and ends, and its messages. */
function prepared(picture) {
  const ops = picture.lanes.flat();
  const messages = picture.lanes.flatMap((lane, to) => lane.flatMap((op) => op.inputs.filter(([from]) => from !== to)
    .map(([from, position, arrives]) => ({ from, to, leaves: picture.lanes[from][position].end, arrives }))));
  return {
    ...picture, messages, begin: least(ops.map(({ start: time }) => time)), end: greatest(ops.map(({ end }) => end)),
    hasMemory: picture.memory.flat().some(([, value]) => value > 0),
  };
}

function settle() {
  clearTimeout(settling);
  plot.show(state, pictures);
  settling = setTimeout(async () => {
    plot.complete();
    const fragment = isStart() ? '' : await toFragment(state);
    history.replaceState(null, '', fragment === null ? location.pathname : `${location.pathname}${fragment && '#'}${fragment}`);
  }, DELAY);
}

async function save(k, kind) {
  notify('');
  await saveAs(kind, async (format) => {
    const answer = await engine.ask('save', { what: 'save', words: flagsOf(state.panes[k]), kind: format }, state.files);
    if (answer.error) throw new Error(answer.error);
    return answer;
  }).catch((error) => notify(error.message));
}

async function openAll(files) {
  notify('');
  for (const file of files) await open(file.name, file).catch((error) => notify(`${file.name}: ${error.message}`));
}

async function open(name, file) {
  const text = await file.text();
  const flags = await engine.ask('open', { what: 'opened', file: name }, { [name]: text });
  if (flags.error) throw new Error(flags.error);
  state.files[name] = text;
  resizeLists(flags['pipeline-size']);
  for (const size of ['pipeline-size', 'num-microbatches']) if (flags[size]) state.shared[size] = String(flags[size]);
  if (flags.costs) state.shared.costs = name;
  if (flags.costs && state.panes.every(({ run }) => run)) state.panes = state.panes.map((_, k) => ({ schedule: start.panes[k].schedule }));
  if (flags.placement) state.panes = [{ schedule: 'auto', 'num-chunks': String(flags['num-chunks']), placement: flags.placement }];
  if (flags.input) state.panes[0] = { input: name };
  if (flags.run) state.panes = [{ run: name }, { run: name, planned: true }];
  update();
}

function notify(message) {
  $('notice').hidden = !message;
  $('notice').textContent = message;
}

/** The state that a link holds; of a damaged one what the page begins with or the settings that it knows, and a message. */
async function stateOf(fragment) {
  const held = await fromFragment(fragment).catch(() => null);
  const unknown = [];
  const keep = (flags, known, prefix) => {
    for (const flag of Object.keys(flags).filter((name) => !known.has(name))) {
      unknown.push(`${prefix}${flag}`);
      delete flags[flag];
    }
  };
  keep(held?.shared ?? {}, KNOWN, '');
  held?.panes.forEach((pane, k) => keep(pane, KNOWN_OF_PANE, `${LETTERS[k]}.`));
  if (fragment && !held) notify('This link is damaged, so the page shows what it begins with.');
  else notify(unknown.length ? `This link has settings that the page does not know and leaves out: ${unknown.join(', ')}.` : '');
  return held ?? startState();
}

async function follow(fragment) {
  state = await stateOf(fragment);
  panes = [];
  view.toEnd();
  update();
}

$('examples').append(h('option', { value: 'none', disabled: true, selected: true }, 'Examples'), ...EXAMPLES.map(([name], k) => h('option', { value: k }, name)));
$('examples').addEventListener('change', () => {
  follow(EXAMPLES[$('examples').value][1]);
  $('examples').value = 'none';
});
$('share').addEventListener('click', async () => {
  const fragment = await toFragment(state);
  if (fragment === null) return notify('The files are too long for a link: send the files.');
  return copyText($('share'), 'Copy link', `${location.origin}${location.pathname}#${fragment}`);
});
document.querySelector('.skip').addEventListener('click', (event) => { // the address holds the settings
  event.preventDefault();
  $('panes').focus();
});
$('theme').addEventListener('click', () => {
  const { theme } = document.documentElement.dataset;
  const isDark = theme ? theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
  document.documentElement.dataset.theme = isDark ? 'light' : 'dark';
  localStorage.setItem('theme', document.documentElement.dataset.theme);
  repaint();
});
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', repaint);
function repaint() {
  view.readTheme();
  view.changed();
}
addEventListener('hashchange', () => follow(location.hash.slice(1)));
addEventListener('keydown', (event) => {
  const isTyping = event.target.matches('input:not([type=range]):not([type=checkbox]),select,textarea');
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
  const keys = { Home: () => view.toStart(), End: () => view.toEnd(), '+': () => view.zoom(1.5), '-': () => view.zoom(1 / 1.5), 0: () => view.fit() };
  if (event.key === ' ' && !event.target.matches('button,summary,input')) keys[' '] = () => view.toggle();
  if (!keys[event.key] || (event.target.matches('[type=range],[role=slider]') && /Home|End/.test(event.key))) return;
  event.preventDefault();
  keys[event.key]();
});
loaded.then(() => panes.forEach((pane) => pane.wait(waitsFor())));
receiveFiles(openAll);
update();
