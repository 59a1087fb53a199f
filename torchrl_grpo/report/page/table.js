// A list of any length, of which only the visible rows are elements.

const ROW = 26;
// Browsers limit the height of an element. A longer list scrolls in larger steps.
const TALLEST = 8e6;

class VirtualList {
  constructor(makeRow) {
    this.makeRow = makeRow;
    this.count = 0;
    this.spacer = h("div", { className: "spacer" });
    this.element = h("div", { className: "list", tabIndex: 0, onscroll: () => this.draw() }, this.spacer);
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  show(count) {
    this.count = count;
    this.spacer.style.height = `${Math.min(count * ROW, TALLEST)}px`;
    this.element.scrollTop = 0;
    this.draw();
  }

  draw() {
    const visible = Math.ceil(this.element.clientHeight / ROW) + 1;
    const top = this.element.scrollTop;
    const room = Math.max(1, Math.min(this.count * ROW, TALLEST) - this.element.clientHeight);
    const real = Math.max(0, this.count * ROW - this.element.clientHeight);
    const first = Math.floor((Math.min(1, top / room) * real) / ROW);
    const shift = this.count * ROW > TALLEST ? top : first * ROW;
    const rows = [];
    for (let at = first; at < Math.min(this.count, first + visible); at++) {
      const row = this.makeRow(at);
      row.style.top = `${shift + (at - first) * ROW}px`;
      rows.push(row);
    }
    this.spacer.replaceChildren(...rows);
  }
}
