// A canvas as sharp as its screen. Its size is told by the browser and never asked for while drawing: a page in which texts
// were just written would be laid out anew for each answer.

export class Sheet {
  width = 0; // in CSS pixels
  height = 0;

  constructor(canvas, resized) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    new ResizeObserver(() => {
      this.width = canvas.clientWidth; // laid out a moment ago
      this.height = canvas.clientHeight;
      resized();
    }).observe(canvas);
  }

  /** Empty again, in CSS pixels. */
  clear() {
    const { canvas, context, width, height } = this;
    const [real, tall] = [Math.round(width * devicePixelRatio), Math.round(height * devicePixelRatio)];
    if (canvas.width !== real) canvas.width = real;
    if (canvas.height !== tall) canvas.height = tall;
    context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    context.clearRect(0, 0, width, height);
  }
}
