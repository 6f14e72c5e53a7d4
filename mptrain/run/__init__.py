"""Operations on one run: start, resume, evaluation, export, and its ranks and tracker."""
