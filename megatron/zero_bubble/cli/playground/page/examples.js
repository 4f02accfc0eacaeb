// Addresses of states that are worth a look.
const paper = 'pipeline-size=8&num-microbatches=24&time-f=29.718&time-b=29.444&time-w=19.927&time-comm=0.527';

export const EXAMPLES = [
  ['1F1B and zero bubble', ''],
  ['1F1B’s memory: ZB-H1 and a V', 'pipeline-size=4&num-microbatches=8&time-f=10&time-b=9&time-w=7&time-comm=0.3&a.schedule=zb-h1&b.schedule=zb-v'],
  ['Half of 1F1B’s memory', 'pipeline-size=8&num-microbatches=16&a.schedule=1f1b&b.schedule=v-half'],
  ['The paper’s 6.2B model', `${paper}&a.schedule=1f1b&b.schedule=auto&b.memory-limit=12`],
  ['Interleaved, with W delayed', `${paper}&a.schedule=interleaved-1f1b&b.schedule=interleaved-zb`],
  ['A slow rank', 'pipeline-size=6&num-microbatches=12&time-f=10,10,15,10,10,10&time-b=9,9,13,9,9,9&time-w=7,7,11,7,7,7&time-comm=0.3&a.schedule=1f1b&b.schedule=auto'],
  ['Slow messages', 'pipeline-size=4&num-microbatches=12&time-f=10&time-b=10&time-w=10&time-comm=6&a.schedule=zb-h1&b.schedule=auto'],
  ['Recomputation in little memory', 'pipeline-size=8&num-microbatches=16&a.schedule=auto&a.memory-limit=5&b.schedule=auto&b.memory-limit=5&b.recompute=planned'],
  ['The vocabulary on all ranks', 'pipeline-size=4&num-microbatches=8&time-f=10&time-b=10&time-w=10&vocabulary-parallel=12&a.schedule=1f1b&b.schedule=zb-v'],
  ['Iterations that interlock', 'pipeline-size=4&num-microbatches=8&time-f=10&time-b=10&time-w=10&a.schedule=zb-2p&a.post-validation=true&a.steps=3'],
];
