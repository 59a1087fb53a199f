r"""Answers of every usual form, which a worker of ``math_verify`` parses once before it judges.

The parser learns its grammar as it goes: the first answer of a form takes up to a quarter of a second, and
the next one a millisecond. Each answer is judged in a copy of the worker, and what the copy learns is lost
with it.
"""

from __future__ import annotations

SAMPLES = (
    r"7", r"-3.5", r"1,234.5", r"1/2", r"\frac{3}{7}", r"-\frac{1}{2}", r"2\frac{1}{3}", r"50\%", r"\$5",
    r"25 apples", r"12 \text{ cm}", r"90^\circ", r"1.5\times 10^{3}", r"2^{10}\cdot 3", r"\sqrt{2}",
    r"\boxed{3\sqrt{5}}", r"\boxed{42}", r"so the answer is \boxed{\frac{1}{2}}.",
    r"The answer is $\frac{3}{4}$.", r"There are 12 ways.", r"2\pi", r"\frac{\pi}{3}", r"3+4i",
    r"x^2+2x+1", r"y^2-4y+4", r"(x+1)(x-2)", r"\frac{x+1}{x-1}", r"2x+3y=6", r"$x=5$", r"x=3, y=4",
    r"x = -\frac{b}{2a}", r"a_n=n!", r"e^{x}", r"\ln 2", r"\log_2 8", r"\sin(x)+\cos^2 x",
    r"\tan^{-1}(2)", r"\binom{5}{2}", r"|x|", r"\lfloor 2.5\rfloor", r"(3, 4)", r"(1,2,3)", r"[1,2)",
    r"(-1, 5]", r"(-\infty, 3]\cup[4, 5)", r"x\in[0,1]", r"3<x\le 5", r"x\geq 2", r"\{1,2\}",
    r"\{-1,\frac{1}{2}\}", r"1, 2, 3", r"\emptyset", r"\infty", r"\begin{pmatrix}1\\2\end{pmatrix}",
    r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", r"\text{(A)}", r"\text{yes}", r"[-2, 8)",
    r"\left(\frac{1}{2}, \frac{3}{4}\right)", r"\left[0,\frac{1}{2}\right]", r"(0, \infty)",
    r"(x, y)=(1,2)", r"\cos(2x)", r"x^3+3x^2y-y^3", r"\frac{\sqrt{3}}{2}", r"\frac{2x}{x^2+1}",
    r"a=1, b=2, c=3", r"5x-3>7", r"31 dollars", r"\sqrt[3]{4}", r"1+\sqrt{3}", r"(2,\frac{\pi}{3})",
    r"x=1\text{ or }x=2", r"-x+4", r"10^{-3}", r"\pm 3", r"\int_0^1 x\,dx", r"\sum_{k=1}^n k",
    r"f(x)=x^2",
)  # fmt: skip
