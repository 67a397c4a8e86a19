/* Poll times of the event thread: events come at the times (ns) of the arguments, and polls are never
 * late. Prints the delay of each event, and the number of polls so far. */
#include "device/events.c"

int main(int count, char **times)
{
    pace pace = {.pause_ns = SOONEST_NS};
    int64_t now = 1;
    long looks = 0;

    for (int i = 1; i < count; i++) {
        const int64_t at = atoll(times[i]);
        bool has_seen = false;

        while (!has_seen) {
            has_seen = now >= at;
            looks++;
            if (has_seen)
                printf("%lld %ld\n", (long long)(now - at), looks);
            now = next_look(&pace, has_seen, now);
        }
    }
    return 0;
}
