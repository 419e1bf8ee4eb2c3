-- plans: the text of a plan, and of the contributions in it.
-- USES numbers

-- Returns the text of a plan. The text is hashed and logged letter by letter, so only this function makes it: cjson
-- would write an empty list as an empty object. The text of a contribution has no quote and no backslash. A plan has a
-- learning rate if somebody has set one. That of a learner says who that is, the loss if it said one, and the items that it
-- trained on. Numbers have all their digits.
local function encode_plan(plan)
  local function list(items) return #items > 0 and '["' .. table.concat(items, '","') .. '"]' or '[]' end
  local lr = plan.lr and string.format('"lr":%.17g,', plan.lr) or ''
  local by = plan.by and string.format('"by":"%s",', plan.by) or ''
  local loss = plan.loss and string.format('"loss":%.17g,', plan.loss) or ''
  local trained = plan.trained and #plan.trained > 0 and '"trained":' .. list(plan.trained) .. ',' or ''
  return string.format('{"id":%s,"version":%s,"head":"%s","history":"%s","divisor":%s,"progress":%s,%s'
    .. '"contributions":%s,"rejected":%s}', digits(plan.id), digits(plan.version), plan.head, plan.history,
    digits(plan.divisor), digits(plan.progress), lr .. by .. loss .. trained, list(plan.contributions),
    list(plan.rejected))
end

-- Returns the worker that made a contribution, and the unit of data that it used ('-' for none).
local function author_and_unit(contribution)
  return contribution:match('^(%S+) %S+ %S+ %S+ %S+ %S+ (%S+)')
end
