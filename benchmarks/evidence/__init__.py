"""What is learned, with controls, seeds and intervals: experiments, their records, and the page."""
