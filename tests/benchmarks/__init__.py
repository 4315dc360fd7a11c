"""`make bench`: what recording costs, beside what one would use instead, in one run."""
