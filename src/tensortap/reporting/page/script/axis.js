// A log axis: which numbers have a place on it, its ticks and what they say.
const placed = (number) => number > 0 && Number.isFinite(number);

// The ticks of a log axis around these numbers: decades, or 1, 2, 5 where there are few of them.
function ticksOf(numbers) {
  const logs = numbers.filter(placed).map(Math.log10);
  if (!logs.length) return null;
  const low = logs.reduce((a, b) => Math.min(a, b)) - 0.05, high = logs.reduce((a, b) => Math.max(a, b)) + 0.05;
  const steps = high - low < 1.6 ? [0, Math.log10(2), Math.log10(5)] : [0];
  const each = Math.max(1, Math.ceil((high - low) / 7)), all = [];
  for (let power = Math.floor(low / each) * each; power <= high + each; power += each) all.push(...steps.map((step) => power + step));
  const from = all.findLastIndex((tick) => tick <= low), to = all.findIndex((tick) => tick >= high);
  return all.slice(from, to + 1);
}

function tickText(tick) {
  if (tick >= -3.01 && tick <= 3) return text(10 ** tick, 2);
  const power = Math.floor(tick + 1e-9);
  return `${Math.round(10 ** (tick - power))}e${power < 0 ? "−" : "+"}${String(Math.abs(power)).padStart(2, "0")}`;
}
