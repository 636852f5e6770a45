/* Run a function with given registers, as ptrace would make a stopped thread run it: the call returns to an unmapped address, and
 * the registers at that fault are the result. */
#define _GNU_SOURCE
#include <asm/ptrace.h>
#include <signal.h>
#include <string.h>
#include <ucontext.h>

static struct user_pt_regs *registers;
static ucontext_t before;
static volatile int number;

static void exchange(int signal_number, siginfo_t *info, void *context) {
    mcontext_t *now = &((ucontext_t *)context)->uc_mcontext;
    (void)info;
    if (signal_number == SIGUSR1) {
        before.uc_mcontext = *now;
        memcpy(now->regs, registers->regs, sizeof registers->regs);
        now->sp = registers->sp, now->pc = registers->pc;
        return;
    }
    memcpy(registers->regs, now->regs, sizeof registers->regs);
    registers->sp = now->sp, registers->pc = now->pc;
    memcpy(now->regs, before.uc_mcontext.regs, sizeof now->regs);
    now->sp = before.uc_mcontext.sp, now->pc = before.uc_mcontext.pc;
    number = signal_number;
}

/* Return the signal with which the call has ended. */
int run(struct user_pt_regs *given) {
    static const int SIGNALS[] = {SIGUSR1, SIGSEGV, SIGBUS, SIGILL};
    struct sigaction old[4], action = {.sa_sigaction = exchange, .sa_flags = SA_SIGINFO};
    sigfillset(&action.sa_mask);
    registers = given, number = 0;
    for (int i = 0; i < 4; i++)
        sigaction(SIGNALS[i], &action, &old[i]);
    raise(SIGUSR1);
    for (int i = 0; i < 4; i++)
        sigaction(SIGNALS[i], &old[i], NULL);
    return number;
}
