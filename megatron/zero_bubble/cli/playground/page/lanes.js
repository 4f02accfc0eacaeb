// Draws a timeline on a canvas: a lane a rank, and below them the memory that each rank holds.
import { figure, greatest, ticks } from './dom.js';

export const LEFT = 46;
const RIGHT = 10;
const TOP = 4;
const AXIS = 24;
const CURVES = 76;
const GAP = 20;

const lane = (ranks) => [[4, 34], [8, 28], [16, 21], [32, 15], [64, 10]].find(([most]) => ranks <= most)?.[1] ?? 7;

/** Where everything of a picture is: times to pixels, and back. */
export class Scale {
  constructor(picture, width, view) {
    Object.assign(this, { width, from: view.from, to: view.to });
    this.ranks = picture.lanes.length;
    this.lane = lane(this.ranks);
    this.bottom = TOP + this.ranks * (this.lane + 2);
    this.curves = this.bottom + AXIS + GAP;
    this.most = Math.max(0, greatest(picture.memory.flat().map(([, value]) => value)));
    this.height = this.most > 0 ? this.curves + CURVES + 8 : this.bottom + AXIS;
  }

  get right() { return this.width - RIGHT; }
  x(time) { return LEFT + ((time - this.from) / (this.to - this.from)) * (this.right - LEFT); }
  time(x) { return this.from + ((x - LEFT) / (this.right - LEFT)) * (this.to - this.from); }
  top(rank) { return TOP + rank * (this.lane + 2); }
  middle(rank) { return this.top(rank) + this.lane / 2; }
  memory(value) { return this.curves + CURVES * (1 - value / this.most); }
  rankAt(y) {
    const rank = Math.floor((y - TOP) / (this.lane + 2));
    return rank >= 0 && rank < this.ranks && y < this.bottom ? rank : null;
  }
}

/** Draw all that does not move. `shown` is the microbatch that is pointed at, if any; the others are faint then. */
export function drawStill(context, picture, scale, ink, { shown, limit }) {
  context.clearRect(0, 0, scale.width, scale.height);
  context.font = `11px ${ink.font}`;
  context.textBaseline = 'middle';
  drawFrame(context, picture, scale, ink);
  context.save();
  context.beginPath();
  context.rect(LEFT, 0, scale.right - LEFT, scale.height);
  context.clip();
  picture.lanes.forEach((each, rank) => drawLane(context, picture, scale, ink, each, rank, shown));
  if (scale.most > 0) drawMemory(context, picture, scale, ink, limit);
  context.restore();
}

function drawFrame(context, picture, scale, ink) {
  context.textAlign = 'right';
  const every = Math.max(1, Math.round(11 / scale.lane));
  for (let rank = 0; rank < scale.ranks; rank += 1) {
    context.fillStyle = ink.muted;
    if (rank % every === 0) context.fillText(scale.ranks > 16 ? rank : `rank ${rank}`, LEFT - 8, scale.middle(rank) + 0.5);
    context.fillStyle = ink.lane;
    context.fillRect(LEFT, scale.top(rank), scale.right - LEFT, scale.lane);
  }
  const bottom = scale.most > 0 ? scale.curves + CURVES : scale.bottom;
  const times = ticks(scale.from, scale.to, Math.max(3, scale.width / 110));
  times.forEach((time, k) => {
    const x = Math.round(scale.x(time)) + 0.5;
    context.strokeStyle = ink.line;
    stroke(context, [[x, scale.bottom], [x, bottom]]);
    context.fillStyle = ink.muted;
    context.textAlign = x > scale.right - 20 ? 'right' : 'center';
    context.fillText(k === times.length - 1 ? `${figure(time)} ${picture.unit}` : figure(time), Math.min(x, scale.right), scale.bottom + 13);
  });
}

function drawLane(context, picture, scale, ink, each, rank, shown) {
  const top = scale.top(rank);
  let before = picture.begin;
  each.forEach((op, position) => {
    const { waiting, fills, dark } = picture.kinds[op.kind];
    if (op.start > before) {
      context.globalAlpha = 0.16;
      context.fillStyle = ink.causes[position ? waiting : 'warmup'];
      context.fillRect(scale.x(before), top, scale.x(op.start) - scale.x(before), scale.lane);
    }
    before = op.end;
    const x = scale.x(op.start);
    const width = scale.x(op.end) - x;
    if (x > scale.width || x + width < 0) return;
    context.globalAlpha = shown === null || shown === op.microbatch ? 1 : 0.3;
    context.fillStyle = fills[op.chunk] === '#000000' ? ink.strong : fills[op.chunk];
    if (!width) {
      context.fillRect(x - 1.5, top - 1, 3, scale.lane + 2);
      return;
    }
    box(context, x, top, Math.max(width - Math.min(1, width / 6), 0.2), scale.lane);
    drawLabel(context, op, x + width / 2, scale.middle(rank) + 0.5, width - 3, dark[op.chunk] ? '#fefefe' : '#111111');
  });
  if (before < picture.end) {
    context.globalAlpha = 0.16;
    context.fillStyle = ink.causes.tail;
    context.fillRect(scale.x(before), top, scale.x(picture.end) - scale.x(before), scale.lane);
  }
  context.globalAlpha = 1;
}

/** The name of an operation without its chunk, which the colour tells, if it fits. */
function drawLabel(context, op, x, y, room, colour) {
  const words = op.name.replace(/\..*| of .*/, '');
  if (room < 6.5 * words.length) return;
  context.fillStyle = colour;
  context.textAlign = 'center';
  context.fillText(words, x, y, room);
}

function drawMemory(context, picture, scale, ink, limit) {
  context.textAlign = 'left';
  context.fillStyle = ink.muted;
  for (const value of ticks(0, scale.most, 3)) {
    const y = Math.round(scale.memory(value)) + 0.5;
    context.strokeStyle = ink.line;
    stroke(context, [[LEFT, y], [scale.right, y]]);
  }
  for (let rank = scale.ranks - 1; rank >= 0; rank -= 1) {
    context.strokeStyle = picture.rankColours[rank];
    context.lineWidth = 1.5;
    stroke(context, corners(picture.memory[rank]).map(([time, value]) => [scale.x(time), scale.memory(value)]));
  }
  if (limit > 0 && limit <= scale.most * 1.02) {
    context.strokeStyle = ink.strong;
    context.setLineDash([5, 4]);
    stroke(context, [[LEFT, scale.memory(limit)], [scale.right, scale.memory(limit)]]);
    context.setLineDash([]);
  }
  context.lineWidth = 1;
}

/** The numbers beside the curves, which the clipping of the lanes would cut. */
export function drawMemoryNumbers(context, picture, scale, ink) {
  if (!(scale.most > 0)) return;
  context.fillStyle = ink.muted;
  context.textAlign = 'right';
  for (const value of ticks(0, scale.most, 3)) context.fillText(figure(value), LEFT - 8, scale.memory(value));
  context.textAlign = 'left';
  context.fillText(`Memory of each rank (${picture.memoryUnit})`, LEFT, scale.curves - 12);
}

/** The critical path along the feet of its operations, in a colour that is seen on any. */
export function drawPath(context, picture, scale, ink) {
  const points = picture.path.flatMap(([rank, position]) => {
    const { start, end } = picture.lanes[rank][position];
    const y = scale.top(rank) + scale.lane - 2;
    return [[scale.x(start), y], [scale.x(end), y]];
  });
  onEverything(context, ink, points);
}

/** Arrows from the operations that make what an operation waits for. */
export function drawInputs(context, picture, scale, ink, rank, position) {
  const op = picture.lanes[rank][position];
  context.strokeStyle = ink.strong;
  context.lineWidth = 2;
  context.strokeRect(scale.x(op.start), scale.top(rank), scale.x(op.end) - scale.x(op.start), scale.lane);
  for (const [from, at] of op.inputs) {
    if (from === rank) continue;
    const points = [[scale.x(picture.lanes[from][at].end), scale.middle(from)], [scale.x(op.start), scale.middle(rank)]];
    onEverything(context, ink, points);
    context.fillStyle = ink.strong;
    dot(context, ...points[1], 3);
  }
  context.lineWidth = 1;
}

/** The messages that are on their way at a time, as dots between lanes. */
export function drawMessages(context, picture, scale, ink, time) {
  const shortest = (scale.to - scale.from) / 120; // a message that takes no time is seen for a moment
  for (const { from, to, leaves, arrives } of picture.messages) {
    const share = (time - leaves) / Math.max(arrives - leaves, shortest);
    if (share < 0 || share > 1) continue;
    const x = scale.x(leaves + share * Math.max(arrives - leaves, shortest));
    context.fillStyle = ink.panel;
    dot(context, x, scale.middle(from) + share * (scale.middle(to) - scale.middle(from)), 5.5);
    context.fillStyle = ink.accent;
    dot(context, x, scale.middle(from) + share * (scale.middle(to) - scale.middle(from)), 4);
  }
}

/** A step function as the corners of a line. */
function corners(steps) {
  return steps.flatMap(([time, value], k) => (k ? [[time, steps[k - 1][1]], [time, value]] : [[time, value]]));
}

function onEverything(context, ink, points) {
  context.lineJoin = 'round';
  for (const [colour, width] of [[ink.panel, 4], [ink.strong, 1.75]]) {
    context.strokeStyle = colour;
    context.lineWidth = width;
    stroke(context, points);
  }
  context.lineWidth = 1;
}

function stroke(context, points) {
  context.beginPath();
  points.forEach(([x, y], k) => (k ? context.lineTo(x, y) : context.moveTo(x, y)));
  context.stroke();
}

function box(context, x, y, width, height) {
  if (width < 5) {
    context.fillRect(x, y, width, height);
    return;
  }
  context.beginPath();
  context.roundRect(x, y, width, height, 2.5);
  context.fill();
}

function dot(context, x, y, radius) {
  context.beginPath();
  context.arc(x, y, radius, 0, 7);
  context.fill();
}
