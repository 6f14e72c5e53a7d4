"""Operations on one training run: start, resume, evaluation, export, and its ranks and experiment tracker."""
