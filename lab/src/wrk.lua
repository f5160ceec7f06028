-- Pace of wrk, and what it measured. The argument is the pause after a response, milliseconds.
function init(args)
  pause = tonumber(args[1])
end

function delay()
  return pause
end

-- Responses after the timeout, which is two seconds, are errors without a latency.
function done(summary, latency, requests)
  local times = io.open("times", "w")
  for i = 1, #latency do
    local us, count = latency(i)
    for _ = 1, count do
      times:write(string.format("%d\n", us))
    end
  end
  local errors = summary.errors
  for _ = 1, errors.connect + errors.read + errors.write + errors.timeout do
    times:write("failed 2000000\n")
  end
  times:close()
end
