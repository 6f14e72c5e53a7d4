"""The life of one run: start, resume, evaluation, export, its ranks and its tracker."""
